"""The interface of a speculator, and of the runner of a draft model.

A speculator fills the branches of sequences, step by step. While a round is being verified, there
is one for each of its likely outcomes; once it is decided, that of its outcome. Frames are looked
at between two steps, so a step should be short: one depth, not one tree.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.forward.batch import Draw, Part
from ssd_engine.forward.result import PendingForward
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.tensor_plane.protocol.rows import MakeRows


class CannotSpeculate(Exception):
    """This sequence cannot be served at all; says why."""


class Speculator(Protocol):
    @property
    def pool(self) -> BlockPool | None:
        """The KV blocks, where there is a model."""

    @property
    def is_typical(self) -> bool:
        """Whether the last step took as long as those of a tree do."""

    def new_scope(self) -> int:
        """A new scope: what is cached for one is never seen from another."""

    def open(self, sequence: DraftSequence, scope: int) -> None:
        """Raises NoRoom when it does not fit now, CannotSpeculate when it never will."""

    def memory_share(self, sequence: DraftSequence) -> float:
        """The part of all memory for sequences that it takes, or would take if it were open."""

    def on_round_changed(self, sequence: DraftSequence) -> None:
        """The sequence followed an outcome or a launch. Raises CannotSpeculate, and NoRoom where it
        has grown beyond the room that there is: once there is more, this can be called again."""

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        """Rows of the next step of this sequence, at most about ``limit``; 0 with nothing to do."""

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        """One forward for all of them; returns its rows."""

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        """Where the token stood among the guesses after ``accepted``, and how many these were."""

    def draft_distributions(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        """Rejection: the distributions of the first tokens of the decided branch [count, vocab].
        They are made on another thread, while the engine goes on."""

    @property
    def features(self) -> FeatureNeeds | None:
        """The rows of the target's hidden states that it reads; None where it reads none."""

    def features_from(self, sequence: DraftSequence) -> int:
        """The first position of the sequence whose features are of use: before it, what is cached
        is known."""

    def features_until(self, sequence: DraftSequence, start: int) -> int:
        """How far rows from ``start`` on can be taken, so that none is forgotten before it was
        read."""

    def take_features(self, sequence: DraftSequence, start: int, rows: Tensor) -> None:
        """What the target has told of positions from ``start`` on [n, width]. They may be late,
        repeated, of positions known already, or leave a gap."""

    def close(self, sequence: DraftSequence) -> None: ...

    def check_integrity(self, num_sequences: int) -> None: ...


class ReadsNoFeatures:
    """The part of a speculator that reads none of its target's hidden states."""

    features: FeatureNeeds | None = None

    def features_from(self, sequence: DraftSequence) -> int:
        return sequence.num_committed

    def features_until(self, sequence: DraftSequence, start: int) -> int:
        return sequence.num_committed

    def take_features(self, sequence: DraftSequence, start: int, rows: Tensor) -> None:
        """They are of no use."""


class DraftRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def chains(self) -> bool:
        """Whether a forward can be launched on tokens that only the device knows."""

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> PendingForward: ...

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> PendingForward | None:
        """The same rows, one depth further, where the device allows it."""
