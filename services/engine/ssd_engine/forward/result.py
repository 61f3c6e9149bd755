"""The results of a forward, for each of the rows that it was asked about."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.sampling.params import Logprobs
from ssd_engine.sampling.rejection import FewWeights, SampledSpeculation
from ssd_engine.sampling.reported import ReportedLogprobs


@dataclass(frozen=True, slots=True)
class RejectionVerdict:
    """The outcome of a round that was verified by rejection where the logits are."""

    accepted: int
    token: int  # the one that follows; -1 where its logits have NaN or infinity
    logprobs: Sequence[float] = ()  # one for each of these, if rows were drawn with them


# Rejection where the logits are: of rounds, each with its first row and what it verifies.
Reject = Callable[[Sequence[tuple[int, SampledSpeculation]]], list[RejectionVerdict]]
# Given logits [n, vocab] float32 of a forward's scored rows, a few at a time, in their order.
Score = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The results of a forward; rows are in the order of the parts that asked for them."""

    make_logits: Callable[[], Tensor | None]  # [rows, vocab] float32
    best: NDArray[np.int32] | None = None  # [rows, ranks]: ranked where the logits are, best first
    following: NDArray[np.int32] | None = (
        None  # [rows]: the best, or what rejection draws; -1: none
    )
    sigma: FewWeights | None = None  # what it was drawn from
    drawn: list[int] | None = None  # [rows]: drawn where the logits are
    broken: Sequence[int] = ()  # [rows], if drawn: not 0 where logits have NaN or infinity
    reported: ReportedLogprobs | None = None  # where log probabilities are asked for
    reject: Reject | None = None
    clock: Callable[[], float] = lambda: 0.0
    make_features: Callable[[], Tensor | None] = lambda: None

    @property
    def features(self) -> Tensor | None:
        """The residual stream of all rows [rows, boundaries * d], part after part, where it is
        watched; None where it is not. Nobody writes to it any more. It is there until the step
        after the next one is launched."""
        return self.make_features()

    @property
    def seconds(self) -> float:
        """The device's seconds; asked for once, and best when it has something to do again."""
        return self.clock()

    def logprobs(self, row: int, top_n: int) -> Logprobs:
        """The log probabilities of a row that was drawn with them."""
        if self.reported is None:
            raise RuntimeError("no log probabilities were asked for")
        return self.reported.logprobs(row, top_n)

    @property
    def logits(self) -> Tensor:
        """Logits are for those who need more than what was drawn: a look at them takes a while."""
        logits = self.make_logits()
        if logits is None:
            raise RuntimeError("no logits were asked for")
        return logits


class PendingForward(Protocol):
    """A forward that was launched."""

    rows: Sequence[int]  # rows of the step that ask for logits; empty where nobody may name them

    def done(self) -> bool: ...

    def result(self) -> ForwardResult:
        """Waits for the forward."""


class ImmediateForward:
    """A forward on a device that works only when asked: it begins when the result is wanted."""

    rows: Sequence[int] = ()

    def __init__(
        self,
        forward: Callable[[], Tensor | None],
        features: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """``features``: what the last forward told of its rows."""
        self._forward, self._features = forward, features

    def done(self) -> bool:
        return True

    def result(self) -> ForwardResult:
        begin = time.monotonic()
        logits = self._forward()
        seconds, features = time.monotonic() - begin, self._features()
        return ForwardResult(lambda: logits, clock=lambda: seconds, make_features=lambda: features)
