"""A draft model: one forward for all sequences at a time, one depth after the other."""

from collections.abc import Sequence

import torch

from ssd_draft.config import DraftEngineOptions
from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.speculators.base import DraftRunner, ReadsNoFeatures
from ssd_draft.speculators.model.forwards import LaunchedForward, launch, launch_ahead
from ssd_draft.speculators.model.kv_room import LOOK_AHEAD, KVRoom
from ssd_draft.speculators.model.results import read_result
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_engine.sampling.rejection import whole_wire
from ssd_engine.speculation.frames import Verification
from ssd_engine.tensor_plane.protocol.rows import MakeRows


class ModelSpeculator(ReadsNoFeatures):
    """Each sequence's ``state`` is a ModelSequence."""

    def __init__(
        self,
        runner: DraftRunner,
        block_size: int,
        max_context: int,
        depth: int,
        budget: int,
        vocab_size: int | None = None,
    ) -> None:
        """``vocab_size`` counts the tokens, where the model computes more."""
        self._runner, self._vocab_size, self._budget = runner, vocab_size, budget
        self._room = KVRoom(runner.num_blocks, block_size, max_context, depth, budget)
        self.pool = self._room.pool
        self._ahead: LaunchedForward | None = None
        # On a GPU, the step after a change of rounds may wait for a forward that was launched ahead
        # and is of no use any more; and one that the target waits for has the device to itself.
        self.is_typical = True

    # Sequences

    def new_scope(self) -> int:
        return self.pool.new_root()

    def open(self, sequence: DraftSequence, scope: int) -> None:
        self._room.check_context(sequence)
        path, scratch = self._room.lease(sequence, scope)
        ranks_ahead = sequence.verification is Verification.COUPLED or self._runner.chains
        sequence.state = ModelSequence(
            sequence,
            path,
            scratch,
            self.pool.block_size,
            self._room.max_context,
            LOOK_AHEAD if ranks_ahead else 0,
        )

    def memory_share(self, sequence: DraftSequence) -> float:
        return self._room.share(sequence)

    def on_round_changed(self, sequence: DraftSequence) -> None:
        sequence.state.on_round_changed()
        self._room.check_context(sequence)

    def close(self, sequence: DraftSequence) -> None:
        sequence.state.release()
        sequence.state = None

    def check_integrity(self, num_sequences: int) -> None:
        self.pool.check_integrity()
        if self.pool.num_leases != 2 * num_sequences:
            raise RuntimeError("draft integrity: a lease without a sequence")

    # Forwards

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        return 0 if sequence.complete else sequence.state.rows(limit, self._budget)

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        """Where the device allows it, the next depth is launched before this one is looked at."""
        forward, self._ahead = self._ahead, None
        follows = forward is not None and forward.is_next(sequences)
        preparing = all(sequence.phase is DraftRoundPhase.VERIFYING for sequence in sequences)
        self.is_typical = not self._runner.chains or (follows and preparing)
        if forward is None or not follows:
            forward = launch(self._runner, sequences, limit, plans)
        if forward is None:
            return 0
        if self._runner.chains:
            self._ahead = launch_ahead(self._runner, forward)
        read_result(forward.pending.result(), forward.groups)
        if self._ahead is not None:
            self._ahead.mark_written()
        return sum(len(part.tokens) for part in forward.parts)

    # Answers

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        rankings = sequence.state.rankings
        if accepted >= len(rankings):
            return None, 0
        ranking = rankings[accepted]
        return (ranking.index(token) if token in ranking else None), len(ranking)

    def draft_distributions(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        wires = sequence.state.distributions[:count]
        if not count or len(wires) < count:
            return None
        host = torch.device("cpu")
        return lambda: whole_wire(wires, host)[:, : self._vocab_size].contiguous()


def make_speculator(options: DraftEngineOptions, runner: DraftRunner | None) -> ModelSpeculator:
    if runner is None:
        raise RuntimeError("a model speculator needs a model")
    return ModelSpeculator(
        runner,
        options.block_size,
        options.max_context,
        options.depth,
        options.budget,
        options.vocab_size,
    )
