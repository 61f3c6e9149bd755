"""Mode sync: a draft model inside the engine drafts, then the target verifies, in turns."""

from collections.abc import Callable, Iterable, Sequence

from ssd_engine.sampling.rejection import whole_wire
from ssd_engine.speculation.frames import Source
from ssd_engine.speculation.speculation import Speculation
from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.records.speculation_options import Mode
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)
from ssd_target.speculation.off import PlainDecoding
from ssd_target.speculation.pacing import Pacing
from ssd_target.speculation.sync_drafter import Drafter, DraftRow


class SyncSpeculation:
    """Requests for the draft model inside draft with it, unless that does not pay."""

    mode = Mode.SYNC

    def __init__(
        self,
        drafter: Drafter,
        plain: PlainDecoding,
        pacing: Pacing,
        endpoints: Iterable[DraftEndpoint],
        auto_off: bool,
        trace: Trace,
        clock: Callable[[], float],
    ) -> None:
        self.drafter, self.payoff = drafter, Payoff(auto_off)
        self._plain, self._pacing, self._endpoints = plain, pacing, endpoints
        self._trace, self._now = trace, clock

    def is_plain(self, state: SequenceSpeculation) -> bool:
        return not self.payoff.speculates

    def look_up(self, state: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        row = self.row(state, num_rows)
        if self.payoff.speculates:
            return row
        if row.wanted:
            state.stats.fell_back("does not pay")
        return self._plain.look_up(state, num_rows)

    def row(self, state: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        return RowSpeculation(state, self, self._pacing.sync_depth(state, num_rows))

    def draft(self, rows: Sequence[RowSpeculation]) -> None:
        """The draft model's turn: fill all rows that go this way."""
        if not rows:
            return
        begin = self._now()
        behind = [self.drafter.is_behind(row.state.sequence) for row in rows]
        drafts = [
            DraftRow(row.state.sequence, row.wanted, row.down_weight, [*row.speculation.tokens])
            for row in rows
        ]
        self.drafter.draft(drafts)
        counts = [
            len(draft.tokens) - len(row.speculation)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        end, longest = self._now(), max(counts)
        if not any(behind):
            self._pacing.drafted(longest, end - begin)
        self._trace.span(TraceEventKind.DRAFT, begin, end, tokens=longest)
        for row, draft, drafted, was_behind in zip(rows, drafts, counts, behind, strict=True):
            row.catches_up = was_behind and drafted > 0
            if drafted:
                row.speculation, row.source = Speculation(draft.tokens), Source.SYNC
                row.wire = whole_wire(draft.wires) if draft.wires else None
            elif row.wanted and not row.speculation:
                row.state.stats.fell_back("no room")

    def launch(self, row: RowSpeculation) -> None:
        row.state.session.launch(len(row.speculation))

    def observe(self, row: RowSpeculation, tokens: int, row_seconds: float) -> None:
        before = self.payoff.current.verdict
        self.payoff.observe(row.strategy is self, tokens, row_seconds)
        if self.payoff.current.verdict != before:
            for endpoint in self._endpoints:
                endpoint.payoff.forget_without()

    def release(self, state: SequenceSpeculation, reason: str) -> None:
        self.drafter.end(state.sequence.id)
