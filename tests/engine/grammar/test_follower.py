"""A follower says of any text what may come next, whatever it was asked before."""

import random

import numpy as np

from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.scale import share

SCHEMA = """{"type": "object", "required": ["name", "age", "kind"], "properties": {
  "name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["red", "green"]}}}"""
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
END = 1


def tokens_of(allowed: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(allowed, bitorder="little")).tolist()


def test_what_is_allowed_depends_on_the_text_alone(compiler: GrammarCompiler) -> None:
    """Steps, ways back and other ways: as one that has read the text from its beginning."""
    rng, follower, text = random.Random(5), compiler.follow(GRAMMAR), list[int]()
    for _ in range(share(2000)):
        if text and rng.random() < 0.3:
            del text[rng.randrange(len(text)) :]
        cut = rng.randrange(len(text) + 1)
        allowed = follower.allowed(text[:cut], text[cut:])
        fresh = compiler.follow(GRAMMAR).allowed(text)
        assert allowed is not None
        assert fresh is not None
        assert np.array_equal(allowed, fresh)
        token = rng.choice(tokens_of(allowed))
        text = [] if token == END else [*text, token]


def test_a_text_that_is_none_of_the_grammar_has_no_next_token(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = compiler.follow(GRAMMAR)
    wrong = tokenizer.encode("Once upon", add_special_tokens=False)
    assert follower.allowed(wrong) is None
    assert follower.allowed([], wrong) is None
    assert follower.num_allowed([], wrong) == 0
    beyond = [10**6]
    assert follower.allowed(beyond) is None
    assert follower.num_allowed([], beyond) == 0
    allowed = follower.allowed([])  # it finds its way back
    assert allowed is not None
    assert allowed.any()


def test_certain_tokens_are_the_only_ones_of_their_places(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = compiler.follow(GRAMMAR)
    forced = follower.forced([], 100)
    assert tokenizer.text_of(forced) == '{"name": "'[: len(tokenizer.text_of(forced))]
    assert len(forced) > 3
    for i, token in enumerate(forced):
        allowed = follower.allowed(forced[:i])
        assert allowed is not None
        assert tokens_of(allowed) == [token]
    assert follower.forced([], 2) == forced[:2]
    after = follower.allowed(forced)
    assert after is not None
    assert len(tokens_of(after)) > 1
