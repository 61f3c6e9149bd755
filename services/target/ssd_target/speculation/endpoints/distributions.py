"""What speculated tokens were drawn from: how each row of a forward that has ended is verified.

Nothing waits for rows: those that are not there when the forward has ended cut the speculation
before the first of them, which keeps the target's distribution.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_target.scheduling.verifier import DraftDistributions
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)

DRAWN_THERE = (Source.CACHE, Source.JUST_IN_TIME)  # by the endpoint, which says from what


class Distributions:
    def __init__(self, endpoints: DraftEndpoints, vocab_size: int) -> None:
        self._endpoints, self._vocab_size = endpoints, vocab_size

    def expect(self, row: RowSpeculation) -> None:
        """The round of this row was launched: its endpoint will send what it drew from."""
        state, receiver = row.state, self._endpoints.held_by(row.state).receiver
        drawn_there = row.speculation and row.source in DRAWN_THERE
        if receiver is not None and state.rejecting and drawn_there:
            receiver.expect(_key(state), len(row.speculation))

    def of(self, rows: Sequence[RowSpeculation]) -> list[DraftDistributions | None]:
        """How each row of the forward that has just ended is verified."""
        return [self._of_row(row) for row in rows]

    def _of_row(self, row: RowSpeculation) -> DraftDistributions | None:
        state = row.state
        if state.request.verification is not Verification.REJECTION or not row.speculation:
            return None
        if row.source not in (Source.SYNC, Source.GRAMMAR) and not state.rejecting:
            state.stats.fell_back("coupled: the endpoint is not trusted")
            return None
        if row.source in DRAWN_THERE:
            row.wire = self._receive(row)
            row.num_cut = max(0, len(row.speculation) - len(row.wire))
        state.stats.rejection_rounds += 1
        return DraftDistributions(row.wire)

    def _receive(self, row: RowSpeculation) -> Tensor:
        """Without rows, the speculation is cut at its start."""
        state, rows = row.state, None
        endpoint = self._endpoints.of(state)
        if endpoint is not None and endpoint.receiver is not None:
            try:
                rows = endpoint.receiver.receive(_key(state), len(row.speculation), 0.0)
            except PlaneBroken as error:
                self._endpoints.give_up(endpoint, f"the tensor plane broke: {error}")
        if rows is None:
            state.stats.fell_back("no distributions")
            return torch.empty(0, self._vocab_size)
        return rows


def _key(state: SequenceSpeculation) -> RowsKey:
    return RowsKey(state.sequence.id, state.session.round)
