"""Verification: a round with guesses ends as plain decoding would, whatever was guessed."""

import math
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.batch import Chunk, Draw
from ssd_engine.forward.result import ForwardResult, RejectionVerdict
from ssd_engine.sampling.params import MAX_TOP_LOGPROBS, Logprobs, SamplingParams
from ssd_engine.sampling.rejection import SampledSpeculation
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.sampling.sampler import SampleRow, logprobs, sample
from ssd_engine.speculation.speculation import Speculation
from ssd_engine.text.completion import StopRules
from ssd_target.scheduling.sequence import Sequence, SequenceState
from ssd_target.scheduling.verifier import (
    DraftDistributions,
    NothingDrawn,
    RoundOutcome,
    draws,
    verify,
)
from ssd_target.scheduling.work import Work, extended
from tests.suite.scale import share
from tests.target import sequences

VOCAB = 40

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "plain": dict(temperature=1.0),
    "filtered": dict(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    "penalties": dict(repetition_penalty=2.5, presence_penalty=2.0, frequency_penalty=3.0),
    "greedy penalties": dict(temperature=0.0, frequency_penalty=4.0, logit_bias=((3, 2.0),)),
    # Half of the tokens, up to and with the third row of a round.
    "bans": dict(temperature=1.0, banned=tuple(range(0, VOCAB, 2)), banned_until=8),
}


def make_sequence(options: dict[str, Any], number: int = 1, **changes: Any) -> Sequence:
    sampling = SamplingParams(seed=changes.pop("seed", 9), **options)
    state = changes.pop("state", SequenceState.DECODE)
    given = {"generated": [4, 5], "rules": StopRules(max_tokens=100), **changes}
    sequence = sequences.make_sequence(number, [1, 2, 3], sampling=sampling, **given)
    sequence.state = state
    return sequence


def round_of(sequence: Sequence, guesses: Rows[int]) -> Work:
    tokens = [sequence.last_token, *guesses]
    chunk = Chunk(tokens, sequence.num_committed - 1, [0], len(tokens))
    return Work(sequence, chunk, speculation=Speculation(list(guesses)))


def last_prefill(sequence: Sequence) -> Work:
    """The piece that ends a prompt: many tokens, one row of logits, no guesses."""
    return Work(sequence, Chunk(sequence.committed(), 0, [0], 1))


def make_logits(n: int, seed: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed))


def plain_decoding(sequence: Sequence, logits: Tensor) -> list[int]:
    """Token after token, one row at a time, each with the tokens before it as history."""
    drawn: list[int] = []
    for line in logits:
        history = [*sequence.output, *drawn]
        drawn += sample(line[None], [SampleRow(sequence.sampling, sequence.prompt, history)])
    return drawn


def verify_one(work: Work, logits: Tensor) -> RoundOutcome:
    (outcome,) = verify([work], ForwardResult(lambda: logits))
    assert isinstance(outcome, RoundOutcome)
    return outcome


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("k", range(6))
def test_a_round_ends_in_the_tokens_of_plain_decoding(k: int, options: dict[str, Any]) -> None:
    """The first ``a`` guesses are what plain decoding draws, the next one is not."""
    for seed in range(share(60)):
        sequence = make_sequence(options, seed=seed)
        logits = make_logits(k + 1, seed)
        plain = plain_decoding(sequence, logits)
        for a in range(k + 1):
            guesses = plain[:k]
            if a < k:
                guesses[a] = (guesses[a] + 1) % VOCAB
            outcome = verify_one(round_of(sequence, guesses), logits)
            assert outcome == RoundOutcome(range(a), plain[: a + 1], None)


@pytest.mark.parametrize("wire", [False, True], ids=["looked up", "drawn from a draft's"])
def test_rejection_takes_nothing_that_is_banned(wire: bool) -> None:
    """Each row by its own position: the same token may be drawn in the next one."""
    bans = dict(temperature=1.0, banned=(7,), banned_until=6)
    logits = torch.full((3, VOCAB), -4.0)
    logits[:, 7] = 9.0
    sigma = torch.zeros(2, VOCAB)
    sigma[:, 7] = 1.0
    for guesses, accepted in (([7, 7], 0), ([8, 7], 1)):
        for seed in range(20):
            sequence = make_sequence(bans, seed=seed)
            drawn = sigma.clone()
            drawn[0] = torch.nn.functional.one_hot(torch.tensor(guesses[0]), VOCAB)
            given = DraftDistributions(drawn if wire else None)
            works, scored = [round_of(sequence, guesses)], ForwardResult(lambda: logits)
            (outcome,) = verify(works, scored, [given])
            assert isinstance(outcome, RoundOutcome)
            assert outcome.tokens[0] != 7
            assert outcome.accepted <= 2 * accepted
            assert set(outcome.tokens[1:]) <= {7}


def test_the_last_piece_of_a_prompt_gives_one_token_and_has_no_guesses() -> None:
    sequence = make_sequence(OPTIONS["penalties"], state=SequenceState.PREFILL)
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0  # the prompt's second token
    outcome = verify_one(last_prefill(sequence), logits)
    assert (outcome.accepted, outcome.tokens) == (0, plain_decoding(sequence, logits))


@given(st.data())
@settings(max_examples=share(600), derandomize=True, deadline=None)
def test_rounds_together_end_as_each_does_alone(data: st.DataObject) -> None:
    works, logits = [], []
    for i in range(data.draw(st.integers(1, 5))):
        options = data.draw(st.sampled_from(list(OPTIONS.values())))
        output = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
        prefill = data.draw(st.booleans())
        state = SequenceState.PREFILL if prefill else SequenceState.DECODE
        sequence = make_sequence(options, i, generated=output, seed=i, state=state, num_logprobs=2)
        k = 0 if prefill else data.draw(st.integers(0, 4))
        rows = make_logits(k + 1, data.draw(st.integers(0, 1000)))
        guesses = plain_decoding(sequence, rows)[:k]
        if guesses and data.draw(st.booleans()):
            guesses[data.draw(st.integers(0, k - 1))] = data.draw(st.integers(0, VOCAB - 1))
        works.append(last_prefill(sequence) if prefill else round_of(sequence, guesses))
        logits.append(rows)
    together = verify(works, ForwardResult(lambda: torch.cat(logits)))
    assert together == [verify_one(w, rows) for w, rows in zip(works, logits, strict=True)]


# Log probabilities


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logprobs_are_the_models_own_whatever_the_options(options: dict[str, Any]) -> None:
    sequence = make_sequence(options, num_logprobs=3)
    logits = make_logits(4, 5)
    plain = plain_decoding(sequence, logits)
    outcome = verify_one(round_of(sequence, [*plain[:2], (plain[2] + 1) % VOCAB]), logits)
    assert outcome.logprobs is not None
    assert len(outcome.logprobs) == len(outcome.tokens) == 3
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    for line, token, value in zip(expected, outcome.tokens, outcome.logprobs, strict=False):
        assert value.chosen == pytest.approx(line[token], abs=1e-5)
        assert [token for token, _ in value.top] == np.argsort(-line)[:3].tolist()


# Grammars


class EndingGrammar:
    """Any token, until there are so many; then none."""

    problem = "a bound was reached"

    def __init__(self, most: int) -> None:
        self._most = most

    def allowed(self, output: Rows[int], tail: Rows[int] = ()) -> NDArray[np.uint8]:
        bits = np.zeros(-(-VOCAB // 8), np.uint8)
        return bits if len(output) + len(tail) >= self._most else ~bits


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("drawable", [0, 1, 2, 3])
def test_what_can_be_drawn_is_before_a_grammar_ends(options: dict[str, Any], drawable: int) -> None:
    sequence, logits = make_sequence(options), make_logits(3, 5)
    plain = plain_decoding(sequence, logits)
    sequence.grammar = cast(Any, EndingGrammar(len(sequence.output) + drawable))
    (outcome,) = verify([round_of(sequence, plain[:2])], ForwardResult(lambda: logits))
    if not drawable:
        assert outcome == NothingDrawn("a bound was reached", "grammar")
    else:
        assert outcome == RoundOutcome(range(drawable - 1), plain[:drawable], None)


class OneWay:
    """Nothing else can come in place of these tokens; after them, anything."""

    problem, is_stuck = "", False

    def __init__(self, tokens: Rows[int]) -> None:
        self._tokens = tokens

    def allowed(self, output: Rows[int], tail: Rows[int] = ()) -> NDArray[np.uint8]:
        bits = np.zeros(-(-VOCAB // 8), np.uint8)
        if len(tail) >= len(self._tokens):
            return ~bits
        token = self._tokens[len(tail)]
        bits[token >> 3] = 1 << (token & 7)
        return bits


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("right", [False, True])
def test_certain_tokens_need_no_logits(options: dict[str, Any], where: str, right: bool) -> None:
    """A round ends as if all of its rows were drawn, whatever is guessed after them."""
    certain, sequence = [7, 9, 11], make_sequence(options)
    sequence.grammar = cast(Any, OneWay(certain))
    logits = make_logits(6, seed=11)
    (whole,) = verify([round_of(sequence, [*certain, 1, 1])], ForwardResult(lambda: logits))
    assert isinstance(whole, RoundOutcome)
    guess = whole.tokens[3] if right else (whole.tokens[3] + 2) % VOCAB
    plain = [*certain, guess, 7]
    (expected,) = verify([round_of(sequence, plain)], ForwardResult(lambda: logits))
    full = round_of(sequence, [])
    work = extended(full, Speculation(plain), len(certain))
    assert (work.chunk.num_logits, len(work.chunk.tokens)) == (3, 6)
    left = logits[len(certain) :]
    if where == "device":
        (found,) = verify([work], drawn_on_device([work], left))
    else:
        (found,) = verify([work], ForwardResult(lambda: left))
    assert found == expected
    assert isinstance(found, RoundOutcome)
    assert found.accepted >= len(certain) + right


class LongOutput(list[int]):
    """Too long to be gone through in every round."""

    def __add__(self, other: object) -> Any:
        pytest.fail("the output was copied")

    def __iter__(self) -> Any:
        pytest.fail("the output was gone through")


@pytest.mark.parametrize("name", ["greedy", "plain", "filtered"])
def test_a_round_does_not_copy_what_is_committed(name: str) -> None:
    sequence = make_sequence(OPTIONS[name])
    expected = verify_one(round_of(sequence, [6, 7, 8]), make_logits(4, seed=1))
    sequence.output = LongOutput(sequence.output)
    assert verify_one(round_of(sequence, [6, 7, 8]), make_logits(4, seed=1)) == expected


def test_certain_tokens_have_logits_where_log_probabilities_are_told() -> None:
    sequence = make_sequence(OPTIONS["plain"], num_logprobs=2)
    work = extended(round_of(sequence, []), Speculation([6, 8]), 2)
    assert (work.chunk.num_logits, work.num_certain) == (3, 0)


# Broken logits

BROKEN = {
    "one NaN": lambda row: row.__setitem__(7, math.nan),
    "all NaN": lambda row: row.fill_(math.nan),
    "infinity": lambda row: row.__setitem__(7, math.inf),
    "NaN and infinity": lambda row: row[:2].copy_(torch.tensor([math.nan, math.inf])),
    "nothing possible": lambda row: row.fill_(-math.inf),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("broken", [*BROKEN, "as the device says"])
def test_broken_logits_fail_their_own_round_alone(broken: str, options: dict[str, Any]) -> None:
    """But those of the second round's last row, which is after a wrong guess."""
    logits = make_logits(6, 1)
    first, second = make_sequence(options, 1, seed=1), make_sequence(options, 2, seed=2)
    (token,) = plain_decoding(second, logits[3:4])
    works = [
        round_of(first, plain_decoding(first, logits[:3])[:2]),
        round_of(second, [(token + 1) % VOCAB]),
        last_prefill(make_sequence(options, 3, seed=3, state=SequenceState.PREFILL)),
    ]
    healthy = verify(works, ForwardResult(lambda: logits))
    for row, hit in ((0, 0), (2, 0), (3, 1), (4, None), (5, 2)):
        if broken in BROKEN:
            bad = logits.clone()
            BROKEN[broken](bad[row])
            outcomes = verify(works, ForwardResult(partial(torch.clone, bad)))
        else:
            outcomes = verify(works, drawn_on_device(works, logits, [row]))
        assert [isinstance(each, NothingDrawn) for each in outcomes] == [i == hit for i in range(3)]
        assert [o == h for o, h in zip(outcomes, healthy, strict=True)] == [
            i != hit for i in range(3)
        ]


def test_a_token_without_probability_is_no_broken_row() -> None:
    logits = make_logits(1, 2)
    logits[0, 5:] = -math.inf
    assert verify_one(round_of(make_sequence(dict(temperature=1.0)), []), logits).tokens[0] < 5


def row_of(draw: Draw, tokens: Rows[int]) -> SampleRow:
    """``tokens``: those of its run, up to its own."""
    told = dict(top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    params = SamplingParams(draw.seed, draw.temperature, **told)  # type: ignore[arg-type]
    if (history := draw.history) is None:
        return SampleRow(params, (), range(draw.position))
    params = replace(history.params, **told)  # type: ignore[arg-type]
    row = SampleRow(params, history.prompt, [*history.output, *tokens[len(tokens) - draw.recent :]])
    assert row.position == draw.position
    return row


def drawn_on_device(works: list[Work], logits: Tensor, broken: Rows[int] = ()) -> ForwardResult:
    """As a device scores rows: it draws what it is told to draw, and tells what is broken."""
    drawn: list[int] = []
    for work in works:
        for i, draw in enumerate(draws([work])):
            row = logits[len(drawn)]
            token = 0
            if draw is not None:
                tokens = work.chunk.tokens[: len(work.chunk.tokens) - work.chunk.num_logits + i + 1]
                (token,) = sample(row[None], [row_of(draw, tokens)])
            drawn.append(token)
    values = logprobs(logits, drawn, [MAX_TOP_LOGPROBS] * len(drawn))
    return ForwardResult(
        lambda: logits,
        drawn=drawn,
        broken=[i in broken for i in range(len(drawn))],
        reported=ReportedLogprobs(np.stack([report_of(value) for value in values])),
    )


def report_of(value: Logprobs) -> NDArray[np.int32]:
    tokens, likeliest = zip(*value.top, strict=True)
    floats = np.array([value.chosen, *likeliest], dtype=np.float32).view(np.int32)
    return np.concatenate((floats[:1], np.array(tokens, dtype=np.int32), floats[1:]))


def test_rounds_end_alike_wherever_their_tokens_are_drawn() -> None:
    """Log probabilities, too, where they are asked for."""
    sequences = [
        make_sequence(options, i, num_logprobs=(None, 0, 3)[i % 3])
        for i, options in enumerate(OPTIONS.values())
    ]
    works = [round_of(sequence, [6, 7, 8]) for sequence in sequences]
    logits = make_logits(4 * len(works), seed=8)
    for i, work in enumerate(works):  # two right guesses for each
        own = plain_decoding(sequences[i], logits[4 * i : 4 * i + 2])
        works[i] = round_of(work.sequence, [*own, 9])
    expected = verify(works, ForwardResult(lambda: logits))
    assert verify(works, drawn_on_device(works, logits)) == expected
    assert all(isinstance(each, RoundOutcome) and each.accepted >= 2 for each in expected)


def test_rounds_that_the_device_rejects_end_as_it_says() -> None:
    """Nobody looks at their logits. Broken rows count up to the last one that is emitted from."""
    sequence = make_sequence(OPTIONS["plain"], num_logprobs=2)
    work, logits = round_of(sequence, [6, 7, 8]), make_logits(4, seed=3)
    wire, values = torch.ones(3, VOCAB), logprobs(logits[:2], [6, 9], [2, 2])

    def end(verdict: RejectionVerdict, broken: Rows[int] = ()) -> RoundOutcome | NothingDrawn:
        def reject(rounds: Rows[tuple[int, SampledSpeculation]]) -> list[RejectionVerdict]:
            assert rounds == [(0, SampledSpeculation(9, sequence.num_committed, [6, 7, 8], wire))]
            return [verdict]

        scored = drawn_on_device([work], logits, broken)
        scored = replace(scored, make_logits=lambda: None, reject=reject)
        (outcome,) = verify([work], scored, [DraftDistributions(wire)])
        return outcome

    verdict = RejectionVerdict(1, 9, [each.chosen for each in values])
    assert end(verdict) == end(verdict, [2, 3]) == RoundOutcome(range(1), [6, 9], values)
    for row in (0, 1):
        assert isinstance(end(verdict, [row]), NothingDrawn)
    assert isinstance(end(RejectionVerdict(1, -1, verdict.logprobs)), NothingDrawn)
