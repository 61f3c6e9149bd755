"""What the engine holds for one link, and what it counts."""

from collections import deque
from collections.abc import Callable

from ssd_draft.engine.fair_scheduler import LinkAccount
from ssd_draft.engine.told_features import FeatureCounts, ToldFeatures
from ssd_draft.planning.plan import Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.kvcache.scopes import Scopes
from ssd_engine.speculation.frames import DraftFrame, Notice, NoticeKind, TargetFrame
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tracing.histogram import count_seconds, new_counts


class LinkSequences:
    """The open sequences of one link, and its frames in both directions."""

    def __init__(self, link: int, planner: Planner, new_scope: Callable[[], int]) -> None:
        self.id = link
        self.planner = planner
        self.scopes: Scopes[int] = Scopes(new_scope)
        self.sequences: dict[int, DraftSequence] = {}
        self.sender: Sender | None = None  # of distributions
        self.features: ToldFeatures | None = None  # where the speculator reads some
        self.inbox: deque[TargetFrame] = deque()
        self.account = LinkAccount()
        self.outbox: list[DraftFrame] = []
        self.consumed = 0

    @property
    def is_active(self) -> bool:
        """Whether a sequence has something to do."""
        return any(not sequence.complete for sequence in self.sequences.values())

    @property
    def has_news(self) -> bool:
        """Whether something has come that was not looked at."""
        if self.inbox:
            return True
        return self.features is not None and self.features.has_news(self.sequences)

    def notify(self, sequence: int, round: int, kind: NoticeKind, reason: str) -> None:
        self.outbox.append(Notice(sequence, round, kind, reason))


class Counters:
    """Totals since the engine began."""

    def __init__(self) -> None:
        self.steps = self.rows = self.branches = self.branch_tokens = self.rounds = 0
        self.evictions = self.refusals = self.dropped_frames = 0
        self.features = FeatureCounts()
        self.builds, self.build_micros = new_counts(), 0

    def count_features(self, more: FeatureCounts) -> None:
        total = self.features
        total.told += more.told
        total.dropped += more.dropped
        total.rounds += more.rounds
        total.late += more.late

    def count_tree(self, seconds: float) -> None:
        """A tree is complete, so long after the launch of its round."""
        count_seconds(self.builds, seconds)
        self.build_micros += int(seconds * 1e6)
