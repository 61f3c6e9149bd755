"""What the engine knows of a speculation endpoint: its bounds, its pace, and whether it pays."""

from dataclasses import dataclass, field
from typing import Protocol

from ssd_engine.speculation.fan_out import AcceptanceRate
from ssd_engine.speculation.features import FeatureTerms
from ssd_engine.speculation.frames import Launch, Load, Open, TargetFrame
from ssd_engine.speculation.latency_model import Average
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.protocol.streams import RowsStream
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.report import report_of
from ssd_engine.tensor_plane.sender import Sender
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.speculation.endpoints.payoff import Payoff

LOAD_SECONDS = 1.0  # that an endpoint's word on its load is good for
BUSY_SECONDS = 1.0  # after a notice that there is no room, before the next try
SILENT_VISITS = 3  # in a row, after which nobody is believed to be there
EXPLORE = (64, 8192)  # misses after which a wait is tried again where none was worthwhile
BACK_SECONDS = 60.0  # in which one whose link went down is expected back


class FeatureSender(Protocol):
    """The part of a ``Sender`` that features need."""

    came_up: bool
    reason: str

    @property
    def state(self) -> PlaneState: ...

    @property
    def stream(self) -> RowsStream: ...

    def has_room(self, num_rows: int) -> bool: ...

    def send_made(
        self, key: RowsKey, make: MakeRows, num_rows: int = 0, complete: bool = False
    ) -> bool: ...

    def close(self) -> None: ...


@dataclass
class DraftEndpoint:
    link: int
    payoff: Payoff
    named: bool = False  # only for requests that name it
    epoch: int | None = None  # None: not connected
    max_sequences: int = 0
    max_context: int = 0
    max_depth: int = 0
    leaving: bool = False
    busy_until: float = 0.0  # it said that it has no room
    sequences: set[int] = field(default_factory=set)  # ours, held there
    elsewhere: int = 0  # sequences of other targets, as the endpoint last said
    elsewhere_until: float = 0.0  # from then on nobody knows
    alpha: AcceptanceRate = field(default_factory=AcceptanceRate)
    delay: Average = field(default_factory=Average)  # from an outcome to its branch
    unwaited: int = 0  # misses since the last wait
    explore_after: int = EXPLORE[0]  # so many misses; doubled each time a wait was in vain
    unanswered_since: float | None = None  # the oldest launch after the last sign of life
    silent_since: float | None = None  # the same, of visits that have ended, too
    silent_visits: int = 0  # visits of sequences that ended without a sign of life
    outbox: list[TargetFrame] = field(default_factory=list)
    up_record: DraftLinkUp | None = None
    receiver: Receiver | None = None  # of draft distributions
    terms: FeatureTerms | None = None  # what it reads of the target's hidden states
    features: FeatureSender | None = None  # by which it is told
    back_until: float = 0.0  # what it reads is watched for so long, whatever its plane does
    read: frozenset[int] = frozenset()  # boundaries, by its last terms

    @property
    def up(self) -> bool:
        return self.epoch is not None

    def reads(self, now: float) -> bool:
        """Whether it reads features and can be told, or will soon if it comes back."""
        return bool(self.boundaries(now))

    def boundaries(self, now: float) -> frozenset[int]:
        """Where it reads the target's hidden states."""
        sender = self.features
        is_told = sender is not None and sender.state in (PlaneState.CONNECTING, PlaneState.UP)
        return self.read if is_told or now < self.back_until else frozenset()

    def has_room(self, now: float) -> bool:
        return (
            self.up
            and not self.leaving
            and now >= self.busy_until
            and len(self.sequences) < self.max_sequences
        )

    def occupancy(self, now: float) -> float:
        """The share of its places that are taken. What it said of other targets counts for a while
        only: an endpoint that is asked nothing says nothing new."""
        others = self.elsewhere if now < self.elsewhere_until else 0
        return (len(self.sequences) + others) / max(1, self.max_sequences)

    def connect(self, up: DraftLinkUp, now: float = 0.0) -> None:
        self.up_record = up
        self.epoch, self.leaving, self.unanswered_since = up.epoch, False, None
        self.silent_since, self.silent_visits = None, 0
        self.max_sequences, self.max_context = up.max_sequences, up.max_context
        self.max_depth = up.max_depth
        self.elsewhere, self.busy_until = 0, 0.0
        self.terms = up.features
        if up.features is not None:
            self.read = frozenset(up.features.needs.boundaries)
            self.back_until = now + BACK_SECONDS  # by then it has a plane, or will have none
        self.outbox = []

    def disconnect(self, now: float) -> None:
        self.epoch, self.unanswered_since, self.up_record = None, None, None
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        if self.features is not None:
            self.features.close()
            self.features = None
        if self.terms is not None:
            self.back_until = now + BACK_SECONDS
        self.outbox = []

    def reports(self) -> tuple[PlaneReport, ...]:
        ends = (self.receiver, self.features)
        return tuple(report_of(end) for end in ends if isinstance(end, Receiver | Sender))

    def say(self, frame: Open | Launch, now: float) -> None:
        """A round begins; its branches are the answer."""
        self.outbox.append(frame)
        if self.unanswered_since is None:
            self.unanswered_since = now
        if self.silent_since is None:
            self.silent_since = now

    def heard(self, load: Load | None, now: float) -> None:
        self.unanswered_since = self.silent_since = None
        self.silent_visits = 0
        if load is not None:
            self.elsewhere = max(0, load.open_sequences - len(self.sequences))
            self.elsewhere_until = now + LOAD_SECONDS

    def left(self) -> None:
        """No sequence is held there any more: there is nothing to answer."""
        if self.unanswered_since is not None:
            self.silent_visits += 1
        self.unanswered_since = None

    def is_stalled(self, now: float, timeout: float) -> bool:
        """Visits may be shorter than the time in which an answer is expected: when one after the
        other has got none, nobody is there."""
        silent = self.silent_visits >= SILENT_VISITS
        since = self.silent_since if silent else self.unanswered_since
        return since is not None and now - since > timeout

    def usual_delay(self) -> float | None:
        """None, so as to try, before anything is measured and again from time to time."""
        tries = not self.delay.known or self.unwaited >= self.explore_after
        return None if tries else self.delay.value()

    def waited(self, seconds: float, came: bool) -> None:
        # A branch that did not come would have taken longer than the wait.
        self.delay.observe(seconds if came else 2 * seconds)
        self.explore_after = EXPLORE[0] if came else min(2 * self.explore_after, EXPLORE[1])
