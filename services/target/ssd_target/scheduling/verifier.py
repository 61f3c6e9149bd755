"""The outcome of a round: what the target itself says after each token of a speculation."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import accumulate, islice, takewhile

import torch
from torch import Tensor

from ssd_engine.forward.batch import Draw
from ssd_engine.forward.result import ForwardResult, RejectionVerdict
from ssd_engine.grammar.allowed import Allowed
from ssd_engine.sampling.history import Extended
from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.rejection import SampledSpeculation, verify_rejection
from ssd_engine.sampling.sampler import SampleRow, logprobs, sample, target_distribution
from ssd_engine.speculation.speculation import accepted_path
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.work import Work

Verdict = tuple[Rows[int], list[int]]  # the path that was right, and the tokens that are emitted


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """``path``: the places of the speculated tokens that were right; ``tokens``: these and the
    target's own after them."""

    path: Rows[int]
    tokens: list[int]
    logprobs: list[Logprobs] | None

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class NothingDrawn:
    """Takes the place of an outcome: nothing can be drawn."""

    problem: str
    field: str = ""  # of the request, where that is at fault


NON_FINITE = NothingDrawn(
    "the model gave non-finite logits for this request (weights or dtype overflow)"
)


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """The round is verified by rejection: its tokens were drawn from these distributions.

    ``wire`` [m, vocab] as they were shipped; None: the tokens were not drawn, but looked up.
    """

    wire: Tensor | None


def sample_rows(work: Work) -> list[SampleRow]:
    """Row i of a verification is drawn with the history committed + s1..si. Where the next token is
    certain, none is."""
    sequence, speculated, certain = work.sequence, work.speculation.tokens, work.num_certain
    return [
        SampleRow(
            sequence.sampling,
            sequence.prompt,
            Extended(sequence.output, speculated[:i]) if i else sequence.output,
            _allowed(sequence, speculated[:i]),
        )
        for i in range(certain, certain + work.chunk.num_logits)
    ]


def _allowed(sequence: Sequence, speculated: list[int]) -> Allowed | None:
    grammar = sequence.grammar
    return None if grammar is None else grammar.allowed(sequence.output, speculated)


def draws(works: Rows[Work]) -> list[Draw]:
    """How the tokens of rounds are drawn where the logits are, round after round."""
    return [draw for work in works for draw in _draws(work)]


def _draws(work: Work) -> list[Draw]:
    sequence, count = work.sequence, work.chunk.num_logits
    first, wanted = work.chunk.end - count + 1, sequence.num_logprobs
    likeliest = -1 if wanted is None else wanted
    unknown = work.chunk.tokens[0] < 0  # to all but the device: it is in no history yet
    recent = work.num_certain + unknown
    return [
        Draw.of(sequence.sampling, first + i, sequence.history, i + recent, (), likeliest)
        for i in range(count)
    ]


# Decides how rounds end; ``verify`` does so by what the model says.
Verifier = Callable[
    [Rows[Work], ForwardResult, Rows[DraftDistributions | None]],
    list[RoundOutcome | NothingDrawn],
]


def verify(
    works: Rows[Work],
    scored: ForwardResult,
    distributions: Rows[DraftDistributions | None] = (),
) -> list[RoundOutcome | NothingDrawn]:
    """Outcomes of rounds whose rows [sum of num_logits] were scored, round after round.

    Coupled: the target draws its own token in every row; a speculated one is right when it is
    that token. Rounds with DraftDistributions are verified by rejection.
    """
    ends = list(accumulate(work.chunk.num_logits for work in works))
    spans = [slice(end - w.chunk.num_logits, end) for w, end in zip(works, ends, strict=True)]
    distributions = distributions or [None] * len(works)
    outcomes: dict[int, RoundOutcome | NothingDrawn] = {}
    if scored.drawn is not None:
        outcomes = {
            i: _drawn_by_device(work, scored, scored.drawn, spans[i])
            for i, work in enumerate(works)
            if distributions[i] is None
        }
    outcomes |= _rejecting_by_device(works, scored, spans, distributions)
    others = [i for i in range(len(works)) if i not in outcomes]
    if others:
        logits = _rows_of(scored.logits, spans, others)
        verdicts = _verify_logits(
            [works[i] for i in others], logits, [distributions[i] for i in others]
        )
        outcomes |= zip(others, verdicts, strict=True)
    return [outcomes[i] for i in range(len(works))]


def _drawn_by_device(
    work: Work, scored: ForwardResult, drawn: list[int], span: slice
) -> RoundOutcome | NothingDrawn:
    wanted = work.sequence.num_logprobs
    path, tokens = _judged(work, drawn[span])
    if any(scored.broken[span][: len(tokens) - work.num_certain]):
        return NON_FINITE
    grammar = work.sequence.grammar
    if grammar is not None and grammar.is_stuck:
        count = grammar.num_allowed(work.sequence.output, tokens)
        path, tokens = _up_to(count, path, tokens)
        if not tokens:
            return NothingDrawn(grammar.problem, "grammar")
    if wanted is None:
        return RoundOutcome(path, tokens, None)
    values = [scored.logprobs(span.start + i, wanted) for i in range(len(tokens))]
    return RoundOutcome(path, tokens, values)


def _rejecting_by_device(
    works: Rows[Work],
    scored: ForwardResult,
    spans: Rows[slice],
    distributions: Rows[DraftDistributions | None],
) -> dict[int, RoundOutcome | NothingDrawn]:
    """The outcomes of rounds with DraftDistributions, where the device can tell."""
    rounds = {
        i: (spans[i].start, _sampled_speculation(works[i], each.wire))
        for i, each in enumerate(distributions)
        if each is not None and works[i].sequence.grammar is None
    }
    if scored.reject is None or not rounds:
        return {}
    verdicts = scored.reject(list(rounds.values()))
    return {
        i: _rejected_outcome(works[i], scored, verdict, spans[i])
        for i, verdict in zip(rounds, verdicts, strict=True)
    }


def _rejected_outcome(
    work: Work, scored: ForwardResult, verdict: RejectionVerdict, span: slice
) -> RoundOutcome | NothingDrawn:
    path, wanted = range(verdict.accepted), work.sequence.num_logprobs
    tokens = [*work.speculation.tokens[: verdict.accepted], verdict.token]
    if verdict.token < 0 or any(scored.broken[span][: len(tokens)]):
        return NON_FINITE
    if wanted is None:
        return RoundOutcome(path, tokens, None)
    # The likeliest tokens are the row's; the device has reported them with what it drew itself.
    values = [
        replace(scored.logprobs(span.start + i, wanted), chosen=chosen)
        for i, chosen in enumerate(verdict.logprobs)
    ]
    return RoundOutcome(path, tokens, values)


def _verify_logits(
    works: Rows[Work], logits: Tensor, distributions: Rows[DraftDistributions | None]
) -> list[RoundOutcome | NothingDrawn]:
    """From logits [sum of num_logits, vocab]."""
    # A row that holds NaN or +inf has a maximum that is not finite.
    finite: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    ends = list(accumulate(work.chunk.num_logits for work in works))
    spans = [slice(end - w.chunk.num_logits, end) for w, end in zip(works, ends, strict=True)]
    rows = [sample_rows(work) for work in works]
    verdicts = _verdicts(works, rows, logits, spans, distributions)
    return [
        _outcome(work, *_drawable(work, own, *verdict), logits[span], finite[span])
        for work, own, verdict, span in zip(works, rows, verdicts, spans, strict=True)
    ]


def _judged(work: Work, drawn: list[int]) -> Verdict:
    """By what was drawn for a round: after certain tokens, and after each that is not."""
    own = [*work.speculation.tokens[: work.num_certain], *drawn]
    path = accepted_path(work.speculation, own)
    return path, own[: len(path) + 1]


def _drawable(work: Work, rows: list[SampleRow], path: Rows[int], tokens: list[int]) -> Verdict:
    """Without the tokens of rows that no token can follow."""
    can_be_drawn = sum(1 for _ in takewhile(_has_next, rows))
    return _up_to(work.num_certain + can_be_drawn, path, tokens)


def _up_to(count: int, path: Rows[int], tokens: list[int]) -> Verdict:
    return (path, tokens) if len(tokens) <= count else (path[: max(0, count - 1)], tokens[:count])


def _has_next(row: SampleRow) -> bool:
    return row.allowed is None or bool(row.allowed.any())


def _verdicts(
    works: Rows[Work],
    rows: Rows[list[SampleRow]],
    logits: Tensor,
    spans: Rows[slice],
    distributions: Rows[DraftDistributions | None],
) -> list[Verdict]:
    """For each round: the path that was right, and the tokens that are emitted."""
    coupled = [i for i, each in enumerate(distributions) if each is None]
    rejecting = [i for i, each in enumerate(distributions) if each is not None]
    verdicts: dict[int, Verdict] = {}
    if coupled:
        verdicts |= _coupled(works, rows, _rows_of(logits, spans, coupled), coupled)
    if rejecting:
        logits = _rows_of(logits, spans, rejecting)
        verdicts |= _rejecting(works, rows, logits, rejecting, distributions)
    return [verdicts[i] for i in range(len(works))]


def _rows_of(logits: Tensor, spans: Rows[slice], chosen: Rows[int]) -> Tensor:
    if len(chosen) == len(spans):
        return logits
    return torch.cat([logits[spans[i]] for i in chosen])


def _coupled(
    works: Rows[Work], rows: Rows[list[SampleRow]], logits: Tensor, chosen: Rows[int]
) -> dict[int, Verdict]:
    drawn = iter(sample(logits, [row for i in chosen for row in rows[i]]))
    verdicts = {}
    for i in chosen:
        verdicts[i] = _judged(works[i], list(islice(drawn, works[i].chunk.num_logits)))
    return verdicts


def _rejecting(
    works: Rows[Work],
    rows: Rows[list[SampleRow]],
    logits: Tensor,
    chosen: Rows[int],
    distributions: Rows[DraftDistributions | None],
) -> dict[int, Verdict]:
    wires = {i: each.wire for i in chosen if (each := distributions[i]) is not None}
    # Target and draft may be grown to different vocabularies. No token beyond the smallest of them
    # has a probability.
    width = min([logits.shape[1], *(wire.shape[1] for wire in wires.values() if wire is not None)])
    p = target_distribution(logits, [row for i in chosen for row in rows[i]])[:, :width]
    rounds = [
        _sampled_speculation(works[i], None if wire is None else wire[:, :width])
        for i, wire in wires.items()
    ]
    return {
        i: (range(accepted), [*s.tokens[:accepted], token])
        for i, s, (accepted, token) in zip(chosen, rounds, verify_rejection(p, rounds), strict=True)
    }


def _sampled_speculation(work: Work, wire: Tensor | None) -> SampledSpeculation:
    sequence, tokens = work.sequence, work.speculation.tokens
    return SampledSpeculation(sequence.sampling.seed, sequence.num_committed, tokens, wire)


def _outcome(
    work: Work, path: Rows[int], tokens: list[int], logits: Tensor, finite: list[bool]
) -> RoundOutcome | NothingDrawn:
    if not tokens and work.sequence.grammar is not None:
        return NothingDrawn(work.sequence.grammar.problem, "grammar")
    # Rows after the first wrong token do not exist for plain decoding: they cannot fail a request.
    if not all(finite[: len(tokens) - work.num_certain]):
        return NON_FINITE
    wanted = work.sequence.num_logprobs
    if wanted is None:
        return RoundOutcome(path, tokens, None)
    values = logprobs(logits[: len(tokens)], tokens, [wanted] * len(tokens))
    return RoundOutcome(path, tokens, values)
