"""A head as a speculator: a draft model's forwards, with what targets have told of their rows."""

from collections.abc import Sequence

from torch import Tensor

from ssd_draft.config import DraftEngineOptions
from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.head.head_steps import HeadSteps
from ssd_draft.speculators.head.sequence import HeadSequence
from ssd_draft.speculators.head.told_path import ToldPath
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.speculation.features import FeatureNeeds


class HeadSpeculator(ModelSpeculator):
    """Each sequence's ``state`` is a HeadSequence."""

    def __init__(
        self,
        runner: HeadRunner,
        needs: FeatureNeeds,
        block_size: int,
        max_context: int,
        depth: int,
        budget: int,
        vocab_size: int,
        window: int,
    ) -> None:
        """``max_context`` of the head; ``window``: positions of a sequence whose features are
        kept."""
        super().__init__(HeadSteps(runner), block_size, max_context, depth, budget, vocab_size)
        self.features = needs
        self._window = window

    def open(self, sequence: DraftSequence, scope: int) -> None:
        room, window = self._room, min(self._window, self._room.max_context // 2)
        room.check(sequence)
        tokens, base = sequence.prompt + sequence.output, 0
        # What is cached of a text depends on the token before it, too.
        root = self.pool.root_after(scope, tokens[0]) if tokens else None
        if len(tokens) + room.most_ahead > room.max_context:
            base, root = len(tokens) - 1 - window, None
        most = room.max_tokens(sequence)
        path = ToldPath(self.pool, tokens[1:], room.most_ahead, most, root, room.spare)
        scratch = room.lease_branches(path)
        sequence.state = HeadSequence(
            sequence, self.pool, path, scratch, base, room.max_context, self._window
        )
        sequence.state.judge_waiting()

    def on_round_changed(self, sequence: DraftSequence) -> None:
        sequence.state.on_round_changed()
        self._room.check(sequence)

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        rows = super().step(sequences, limit, plans)
        for sequence in sequences:
            sequence.state.judge_waiting()
        return rows

    def features_from(self, sequence: DraftSequence) -> int:
        state: HeadSequence = sequence.state
        return state.features_from()

    def features_until(self, sequence: DraftSequence, start: int) -> int:
        state: HeadSequence = sequence.state
        return state.features_until(start)

    def take_features(self, sequence: DraftSequence, start: int, rows: Tensor) -> None:
        sequence.state.take_features(start, rows)


def make_speculator(options: DraftEngineOptions, runner: HeadRunner | None) -> HeadSpeculator:
    if runner is None or options.head is None or options.vocab_size is None:
        raise RuntimeError("a head's speculator needs a head")
    return HeadSpeculator(
        runner,
        options.head.needs,
        options.block_size,
        options.max_context,
        options.depth,
        options.budget,
        options.vocab_size,
        options.head.window,
    )
