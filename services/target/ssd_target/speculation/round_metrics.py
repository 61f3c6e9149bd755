"""What rounds were worth: statistics and traces of each, and evidence for what pays."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.records.speculation_stats import LookUp
from ssd_target.speculation.endpoints.payoff import STEADY_STEPS
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.pacing import Pacing

# As they are written in a trace.
_NUMBERS: dict[LookUp | None, int] = {found: i for i, found in enumerate(LookUp, start=1)}


class ForwardTiming(NamedTuple):
    """The size and the time of a decode forward that has ended."""

    width: int  # tokens
    row_seconds: float  # since its speculations were looked up, for each row


class RoundMetrics:
    def __init__(self, pacing: Pacing, trace: Trace, clock: Callable[[], float]) -> None:
        self._pacing, self._trace, self._now = pacing, trace, clock
        self._step_begin = 0.0
        self._held_up = 0  # steps, one after the other, in which the draft model inside caught up

    def begin_step(self) -> None:
        self._step_begin = self._now()

    def count(self, row: RowSpeculation, right: int, now: float) -> None:
        """A round has ended with so many right tokens."""
        state, drafted = row.state, len(row.speculation)
        state.stats.ended(row.strategy.mode, row.source, drafted, right, now - state.ended_at)
        if row.waited:
            state.stats.waited(row.waited)
        self._trace.span(
            TraceEventKind.ROUND,
            state.ended_at,
            now,
            sequence=state.sequence.id,
            round=state.session.round,
            tokens=drafted,
            accepted=right,
            origin=row.source,
            look_up=_NUMBERS.get(row.found, 0),
        )

    def measure(self, rows: Sequence[RowSpeculation]) -> ForwardTiming:
        """The forward in flight is over."""
        seconds = self._now() - self._step_begin
        return ForwardTiming(self._pacing.width, seconds / max(1, len(rows)))

    def observe(
        self,
        rows: Sequence[RowSpeculation],
        seconds: float,
        committed: Sequence[int],
        timing: ForwardTiming,
    ) -> None:
        """A decode forward took ``seconds``, its rows committed so many tokens."""
        self._pacing.verify_clock.observe(timing.width, seconds)
        if self._is_evidence(rows):
            for row, tokens in zip(rows, committed, strict=True):
                row.state.strategy.observe(row, tokens, timing.row_seconds)

    def _is_evidence(self, rows: Sequence[RowSpeculation]) -> bool:
        """A row that catches up has held up all of them. Where that is the rule, as where requests
        are short and many, it is a part of the price."""
        catches_up = any(row.catches_up for row in rows)
        self._held_up = self._held_up + 1 if catches_up else 0
        return not catches_up or self._held_up > STEADY_STEPS
