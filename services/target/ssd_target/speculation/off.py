"""Mode off: plain decoding."""

from ssd_target.records.speculation_options import Mode
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)


class PlainDecoding:
    mode = Mode.OFF

    def is_plain(self, state: SequenceSpeculation) -> bool:
        return True

    def look_up(self, state: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        return RowSpeculation(state, self)

    def launch(self, row: RowSpeculation) -> None:
        row.state.session.launch(len(row.speculation))

    def observe(self, row: RowSpeculation, tokens: int, row_seconds: float) -> None:
        """It is compared with nothing."""

    def release(self, state: SequenceSpeculation, reason: str) -> None:
        """It holds nothing."""
