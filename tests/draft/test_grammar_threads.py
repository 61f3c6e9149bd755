"""Grammars of a draft's sequences: compiled beside it, and once more for its branches."""

import pytest

from ssd_draft.planning import grammars
from ssd_draft.planning.grammars import GrammarThread
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.text.tokenizer import Tokenizer
from tests.waiting import wait_until

GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]{2,5}")


@pytest.fixture(scope="module")
def thread() -> GrammarThread:
    directory = resolve_model("stories-draft")
    config = load_model_config(directory)
    tokenizer = Tokenizer(directory, config)
    return GrammarThread(GrammarCompiler(tokenizer.serialized(), config.vocab_size, [1]))


@pytest.mark.parametrize(("seconds", "others"), [(60.0, 3), (0.0, 0)], ids=["soon", "slowly"])
def test_branches_have_followers_of_their_own_where_a_grammar_is_compiled_soon(
    thread: GrammarThread, monkeypatch: pytest.MonkeyPatch, seconds: float, others: int
) -> None:
    monkeypatch.setattr(grammars, "MOST_OTHERS", 3)
    monkeypatch.setattr(grammars, "QUICK_SECONDS", seconds)
    follower = thread.start(GRAMMAR).result(60.0)
    assert follower is not None
    wait_until(lambda: len(follower.others) == others)
    thread._pool.submit(int).result(60.0)  # all that was asked for before is done
    at = [each.at([]) for each in (follower, *follower.others)]
    assert len(set(map(id, at))) == 1 + others


# Each of them has ended a service, or would.
HOSTILE = {
    "deep": "start: a\na: %json " + '{"items": ' * 200 + "{}" + "}" * 200,
    "long": "start: a0\n" + "".join(f'a{i}: "x" a{i + 1}\n' for i in range(11_500)) + 'a11500: "x"',
    "large": 'start: %json {"type": "integer", "multipleOf": 999983}',
}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "("),
        *(Grammar(GrammarKind.CONTEXT_FREE, source) for source in HOSTILE.values()),
    ],
    ids=["none", *HOSTILE],
)
def test_a_grammar_that_cannot_be_compiled_is_none(
    thread: GrammarThread, grammar: Grammar, caplog: pytest.LogCaptureFixture
) -> None:
    pending = thread.start(grammar)
    assert [pending.result(60.0) for _ in range(3)] == [None] * 3
    (said,) = caplog.messages
    assert said.startswith("Drafting without a grammar: grammar.")
    assert len(said) < 300
