"""The outcome of a round: what the target itself says after each token of a speculation."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from ssd_engine.sampling import SampleRow, logprobs, sample
from ssd_engine.sampling_params import Logprobs
from ssd_target.scheduler import Work
from ssd_target.sequence import State


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first ``accepted`` speculated tokens were right; ``tokens``: these and the target's."""

    accepted: int
    tokens: list[int]
    logprobs: list[Logprobs] | None


@dataclass(frozen=True, slots=True)
class NonFiniteLogits:
    """In place of an outcome: the model gave NaN or infinity: nothing can be drawn from it."""


def speculation(work: Work) -> Rows[int]:
    """The tokens that a round verifies: those after the last committed one."""
    return () if work.sequence.state is State.PREFILL else work.chunk.tokens[1:]


def sample_rows(work: Work) -> list[SampleRow]:
    """Row i of a verification is drawn with the history committed + s1..si."""
    sequence, speculated = work.sequence, list(speculation(work))
    return [
        SampleRow(
            sequence.sampling,
            sequence.prompt,
            sequence.output + speculated[:i] if i else sequence.output,
        )
        for i in range(work.chunk.num_logits)
    ]


def verify(works: Rows[Work], logits: Tensor) -> list[Outcome | NonFiniteLogits]:
    """Outcomes of rounds whose logits [sum of num_logits, vocab] are given, round after round.

    Coupled: the target draws its own token in every row; a speculated one is right when it is
    that token.
    """
    rows = [row for work in works for row in sample_rows(work)]
    drawn = sample(logits, rows)
    # A row that holds NaN or +inf has a maximum that is not finite.
    finite: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    outcomes: list[Outcome | NonFiniteLogits] = []
    begin = 0
    for work in works:
        end = begin + work.chunk.num_logits
        outcomes.append(_outcome(work, drawn[begin:end], logits[begin:end], finite[begin:end]))
        begin = end
    return outcomes


def _outcome(
    work: Work, drawn: list[int], logits: Tensor, finite: list[bool]
) -> Outcome | NonFiniteLogits:
    accepted = count_accepted(speculation(work), drawn)
    tokens = drawn[: accepted + 1]
    # Rows after the first wrong token do not exist for plain decoding: they cannot fail a request.
    if not all(finite[: accepted + 1]):
        return NonFiniteLogits()
    wanted = work.sequence.num_logprobs
    if wanted is None:
        return Outcome(accepted, tokens, None)
    values = logprobs(logits[: len(tokens)], tokens, [wanted] * len(tokens))
    return Outcome(accepted, tokens, values)


def count_accepted(speculated: Rows[int], drawn: Rows[int]) -> int:
    """How many tokens, from the first, are what the target drew in their place."""
    for i, token in enumerate(speculated):
        if token != drawn[i]:
            return i
    return len(speculated)
