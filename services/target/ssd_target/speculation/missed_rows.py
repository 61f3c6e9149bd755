"""Rows whose branch is not here: wait for it where all have missed, or guess at once.

A wait holds the whole forward, so there is none when any row is ready.
"""

from collections.abc import Callable, Sequence

from ssd_engine.speculation.frames import Source
from ssd_engine.speculation.speculation import Speculation
from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.records.speculation_options import Backup
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.pacing import Pacing
from ssd_target.speculation.round_frames import RoundFrames

Receive = Callable[[float], bool]  # handle what comes within so many seconds; False: nothing came


class MissedRows:
    def __init__(
        self,
        backup: Backup,
        endpoints: DraftEndpoints,
        frames: RoundFrames,
        pacing: Pacing,
        receive: Receive,
        trace: Trace,
        clock: Callable[[], float],
    ) -> None:
        self._guesses = backup in (Backup.AUTO, Backup.NGRAM)
        self._endpoints, self._frames, self._pacing = endpoints, frames, pacing
        self._receive, self._trace, self._now = receive, trace, clock

    def wait(self, rows: Sequence[RowSpeculation]) -> None:
        """Only where every row has missed."""
        if not rows or not all(row.missed for row in rows):
            return
        endpoints = [self._endpoints.held_by(row.state) for row in rows]
        budget = min(
            self._pacing.wait_seconds(row, len(rows), endpoint)
            for row, endpoint in zip(rows, endpoints, strict=True)
        )
        for endpoint in endpoints:
            endpoint.unwaited = 0 if budget else endpoint.unwaited + 1
        if budget:
            self._wait_for(rows, budget)

    def _wait_for(self, rows: Sequence[RowSpeculation], budget: float) -> None:
        """Tell the endpoints the outcomes, and wait for the branches that they name."""
        for row in rows:
            self._frames.outcome(row.state)
        self._endpoints.flush()
        begin = self._now()
        elapsed = 0.0
        while elapsed < budget and any(map(_is_awaited, rows)):
            came = self._receive(budget - elapsed)
            elapsed = self._now() - begin if came else budget
        self._trace.span(TraceEventKind.WAIT, begin, begin + elapsed)
        for row in rows:
            row.fill(Source.JUST_IN_TIME)
            row.waited = elapsed
            endpoint = self._endpoints.of(row.state)
            if endpoint is not None:
                endpoint.waited(elapsed, bool(row.speculation))

    def guess(self, rows: Sequence[RowSpeculation]) -> None:
        """An instant guess for rows that have none."""
        if not self._guesses:
            return
        for row in rows:
            depth = self._pacing.ngram_depth(row, len(rows)) if row.missed else 0
            tokens = row.state.look_back(depth) if depth else []
            if tokens:
                row.speculation, row.source = Speculation(tokens), Source.NGRAM


def _is_awaited(row: RowSpeculation) -> bool:
    session = row.state.session
    if not session.attached or session.decided is None:
        return False
    useful = min(row.wanted, row.state.told_depth)  # more is not sent
    return len(session.branches.find(*session.decided)) < useful
