"""A follower says of any text what may come next, whatever it was asked before."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ssd_engine.grammar import masks as masks_module
from ssd_engine.grammar.compiler import LIMITS, GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.masks import HeldRow, mask_bytes, write_masks
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.suite.scale import share

SCHEMA = """{"type": "object", "required": ["name", "age", "kind"], "properties": {
  "name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["red", "green"]}}}"""
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
END = 1


def allowed_by(
    follower: GrammarFollower, text: Sequence[int], tail: Sequence[int] = ()
) -> np.ndarray:
    """What may come after a text that is one of the grammar."""
    allowed = follower.allowed(text, tail)
    assert allowed is not None
    return allowed


def tokens_of(allowed: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(allowed, bitorder="little")).tolist()


def test_what_is_allowed_depends_on_the_text_alone(compiler: GrammarCompiler) -> None:
    """Steps, ways back and other ways: as one that has read the text from its beginning."""
    rng, follower, text = random.Random(5), compiler.follow(GRAMMAR), list[int]()
    for _ in range(share(2000)):
        if text and rng.random() < 0.3:
            del text[rng.randrange(len(text)) :]
        cut = rng.randrange(len(text) + 1)
        allowed = allowed_by(follower, text[:cut], text[cut:])
        assert np.array_equal(allowed, allowed_by(compiler.follow(GRAMMAR), text))
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
    for none in ([10**6], [-1], [-(2**40)]):
        assert follower.allowed(none) is None
        assert follower.num_allowed([], none) == 0
        assert follower.at(none) is None
        masks = np.zeros((2, mask_bytes(len(tokenizer.token_bytes))), np.uint8)
        write_masks(masks, [HeldRow(0, follower, [], []), HeldRow(1, follower, [], none)])
        assert not (masks[0] == 0xFF).all()
    assert allowed_by(follower, []).any()  # it finds its way back


def test_certain_tokens_are_the_only_ones_of_their_places(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = compiler.follow(GRAMMAR)
    forced = follower.forced([], 100)
    assert tokenizer.text_of(forced) == '{"name": "'[: len(tokenizer.text_of(forced))]
    assert len(forced) > 3
    for i, token in enumerate(forced):
        assert tokens_of(allowed_by(follower, forced[:i])) == [token]
    assert follower.forced([], 2) == forced[:2]
    assert len(tokens_of(allowed_by(follower, forced))) > 1


@pytest.mark.parametrize("seconds_alone", [0.0, 1.0])
def test_masks_of_many_rows_are_those_of_each(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, seconds_alone: float
) -> None:
    """Rounds of several texts at once, and branches of one; some leave the grammar."""
    monkeypatch.setattr(masks_module, "ALONE_SECONDS", seconds_alone)
    rng = random.Random(3)
    size = mask_bytes(len(allowed_by(compiler.follow(GRAMMAR), [])) * 8)
    for _ in range(share(200)):
        held: list[HeldRow] = []
        for _ in range(rng.randint(1, 3)):
            follower = compiler.follow(GRAMMAR)
            follower.others += [compiler.follow(GRAMMAR) for _ in range(rng.randrange(3))]
            text = random_text(compiler, rng, rng.randrange(12))
            cut = rng.randrange(len(text) + 1)
            output, tail = text[:cut], text[cut:]
            if rng.random() < 0.5:  # a round
                tails = [tail[:i] for i in range(len(tail) + 1)]
            else:
                tails = [tail, *([*tail[:i], rng.randrange(4000)] for i in range(len(tail)))]
            held += [HeldRow(len(held) + i, follower, output, t) for i, t in enumerate(tails)]
        masks = np.zeros((len(held), size), np.uint8)
        write_masks(masks, held)
        for row, _, output, tail in held:
            expected = compiler.follow(GRAMMAR).allowed(output, tail)
            if expected is not None and expected.any():
                assert np.array_equal(masks[row, : len(expected)], expected)


def random_text(compiler: GrammarCompiler, rng: random.Random, count: int) -> list[int]:
    follower, text = compiler.follow(GRAMMAR), list[int]()
    while len(text) < count:
        allowed = allowed_by(follower, text)
        text.append(rng.choice([token for token in tokens_of(allowed) if token != END]))
    return text


def test_a_bound_that_only_a_guess_reaches_ends_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "step_max_items", 30)
    grammar = Grammar(GrammarKind.CONTEXT_FREE, 'start: s\ns: s s | "a" | "b" s "c"\n')
    follower = GrammarCompiler(tokenizer.serialized(), len(tokenizer.token_bytes), [END]).follow(
        grammar
    )
    a = tokenizer.encode("a", add_special_tokens=False)
    assert not allowed_by(follower, [], a * 3).any()
    assert "Too many items" in follower.problem
    before = allowed_by(follower, [])
    assert before.any()
    masks = np.zeros((4, mask_bytes(len(tokenizer.token_bytes))), np.uint8)
    write_masks(masks, [HeldRow(i, follower, [], a * i) for i in range(4)])
    assert np.array_equal(masks[0, : len(before)], before)
    assert (masks[3] == 0xFF).all()
    assert follower.num_allowed([], a) == 1


LONG = json.dumps({"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 200})


def test_what_was_learnt_at_other_places_ends_no_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of the lexer add up, over a text, over guesses, and over the texts before it."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 160)
    compiler = GrammarCompiler(tokenizer.serialized(), len(tokenizer.token_bytes), [END])
    grammar = Grammar(GrammarKind.JSON_SCHEMA, LONG)
    renewed = 0
    for seed in range(4):
        rng, follower, text = random.Random(seed), compiler.follow(grammar), list[int]()
        first = follower.at([])
        masks = np.zeros((3, mask_bytes(len(tokenizer.token_bytes))), np.uint8)
        for _ in range(60):
            allowed = allowed_by(follower, text)
            assert allowed.any(), follower.problem
            fresh = compiler._compile(grammar)
            assert fresh.try_consume_tokens(text) == len(text)
            bits = np.frombuffer(fresh.compute_bitmask(), np.uint8)[: len(allowed)]
            assert np.array_equal(allowed, bits)
            guess = int(rng.choice(tokens_of(allowed)))
            held = [HeldRow(i, follower, text, [guess] * i) for i in range(3)]
            write_masks(masks, held)
            assert np.array_equal(masks[0, : len(bits)], bits)
            text.append(int(rng.choice([token for token in tokens_of(allowed) if token != END])))
        renewed += follower.at([]) is not first
    assert renewed
