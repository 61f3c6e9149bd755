"""The endpoints as the engine sees them: which are there, what they hold, what they say.

Whatever an endpoint does or fails to do ends in one thing here: the sequence is detached from it
and goes on without; its next launch may open it again, there or elsewhere.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from ssd_engine.speculation.frames import (
    Branches,
    Close,
    DraftFrame,
    FeatureRequest,
    Load,
    Notice,
    NoticeKind,
    Plane,
    TargetFrame,
)
from ssd_engine.tensor_plane.features import FEATURES
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tracing.events import NoTrace, Trace, TraceEventKind
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import SpeculationOptions, SpeculationRequest
from ssd_target.speculation.endpoints.endpoint import BUSY_SECONDS, DraftEndpoint, FeatureSender
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.endpoints.sequence_speculation import SequenceSpeculation

Send = Callable[[int, int, list[TargetFrame]], None]  # link, epoch, frames
Stalled = Callable[[int, int, str], None]  # link, epoch, why it is given up
OpenPlane = Callable[[DraftLinkUp, Plane], Receiver | None]
OpenFeatures = Callable[[DraftLinkUp, Plane], FeatureSender | None]
DISCONNECTED, NO_ROOM = "disconnected", "no room"  # why a sequence is held nowhere


class DraftEndpoints:
    def __init__(
        self,
        options: SpeculationOptions,
        sequences: dict[int, SequenceSpeculation],
        send: Send = lambda link, epoch, frames: None,
        stalled: Stalled = lambda link, epoch, reason: None,
        open_plane: OpenPlane = lambda up, plane: None,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        open_features: OpenFeatures = lambda up, plane: None,
        feed: FeatureFeed | None = None,
    ) -> None:
        self._options = options
        self._open_features = open_features
        self.feed = feed or FeatureFeed()
        self._trace = trace or NoTrace()
        self._sequences = sequences  # all of the target, whether attached or not
        self._send, self._stalled, self._open_plane = send, stalled, open_plane
        self._now = clock
        self._by_link: dict[int, DraftEndpoint] = {}
        self.expected = options.endpoints
        self.dropped = 0  # branches and frames that did not fit

    def __iter__(self) -> Iterator[DraftEndpoint]:
        return iter(self._by_link.values())

    def of(self, state: SequenceSpeculation) -> DraftEndpoint | None:
        """The one that holds the sequence."""
        return self._by_link.get(state.session.link)

    def held_by(self, state: SequenceSpeculation) -> DraftEndpoint:
        """The same, where there must be one."""
        endpoint = self.of(state)
        if endpoint is None:
            raise RuntimeError("the sequence is not attached to an endpoint")
        return endpoint

    def home_of(self, state: SequenceSpeculation) -> DraftEndpoint | None:
        """The one whose payoff the sequence is evidence for, whether it is held there or not."""
        return None if state.home is None else self._by_link.get(state.home)

    @property
    def reads_features(self) -> bool:
        """Whether one is there, or expected back, that reads the target's hidden states."""
        now = self._now()
        return any(endpoint.reads(now) for endpoint in self)

    # Links

    def connected(self, up: DraftLinkUp) -> None:
        """The endpoint of a link, or its next epoch."""
        endpoint = self._by_link.get(up.link)
        if endpoint is None:
            payoff = Payoff(self._options.auto_off)
            endpoint = self._by_link[up.link] = DraftEndpoint(up.link, payoff, up.named)
        if endpoint.epoch is not None:
            self.disconnected(up.link, endpoint.epoch)
        endpoint.connect(up, self._now())

    def disconnected(self, link: int, epoch: int, reason: str = DISCONNECTED) -> None:
        endpoint = self._by_link.get(link)
        if endpoint is None or endpoint.epoch != epoch:
            return
        for key in list(endpoint.sequences):
            self._detach(self._sequences[key], reason)
        endpoint.disconnect(self._now())

    def gone(self, link: int) -> None:
        """The link was down, and will not come up again."""
        self._by_link.pop(link, None)

    def give_up(self, endpoint: DraftEndpoint, reason: str) -> None:
        """End this epoch of the link."""
        epoch = endpoint.epoch
        if epoch is not None:
            self.disconnected(endpoint.link, epoch, "stalled")
            self._stalled(endpoint.link, epoch, reason)

    def check_stalls(self) -> None:
        """One that leaves rounds unanswered for too long is given up."""
        for endpoint in self:
            if endpoint.is_stalled(self._now(), self._options.link_timeout):
                self.give_up(endpoint, "rounds stay unanswered")
            elif endpoint.features is not None and _has_broken(endpoint.features):
                self.give_up(endpoint, f"the tensor plane broke: {endpoint.features.reason}")

    def flush(self) -> None:
        """Sending is a put: it never waits for a link."""
        self.feed.flush(self)
        for endpoint in self:
            if endpoint.outbox and endpoint.epoch is not None:
                frames, endpoint.outbox = endpoint.outbox, []
                self._send(endpoint.link, endpoint.epoch, frames)

    # What they say

    def follow(
        self, link: int, epoch: int, frames: Sequence[DraftFrame], load: Load | None
    ) -> None:
        """Take in what an endpoint said. Frames of another epoch than its own are dropped."""
        endpoint = self._by_link.get(link)
        if endpoint is None or endpoint.epoch != epoch:
            self._drop(link, epoch, frames)
            return
        endpoint.heard(load, self._now())
        for frame in frames:
            if isinstance(frame, Notice):
                self._notice(endpoint, frame)
            elif isinstance(frame, Plane):
                self._plane(endpoint, frame)
            elif isinstance(frame, FeatureRequest):
                self._asks_for_features(endpoint, frame)
            else:
                self._branches(endpoint, frame)

    def _drop(self, link: int, epoch: int, frames: Sequence[DraftFrame]) -> None:
        """Count frames of an epoch that is over as dropped. A round that they name takes none of
        their branches, but notes that stale ones came."""
        self.dropped += len(frames)
        for frame in frames:
            if isinstance(frame, Branches) and frame.sequence in self._sequences:
                self._sequences[frame.sequence].session.push(link, epoch, frame)

    def _branches(self, endpoint: DraftEndpoint, frame: Branches) -> None:
        state = self._sequences.get(frame.sequence)
        if state is None or endpoint.epoch is None:
            self.dropped += len(frame.branches)
            return
        self.dropped += state.session.push(endpoint.link, endpoint.epoch, frame)
        self._trace.moment(
            TraceEventKind.PUSH,
            sequence=frame.sequence,
            round=frame.round,
            tokens=sum(len(branch.tokens) for branch in frame.branches),
        )

    def _plane(self, endpoint: DraftEndpoint, plane: Plane) -> None:
        """It answers once for each stream. Only an endpoint that the operator trusts was offered
        one for distributions."""
        up = endpoint.up_record
        is_features = plane.answer.stream.name == FEATURES
        if up is not None and is_features and up.features and endpoint.features is None:
            endpoint.features = self._open_features(up, plane)
        elif up is not None and not is_features and up.trusted and endpoint.receiver is None:
            endpoint.receiver = self._open_plane(up, plane)
        else:
            self.dropped += 1

    def _asks_for_features(self, endpoint: DraftEndpoint, frame: FeatureRequest) -> None:
        held = frame.sequence in endpoint.sequences and endpoint.terms is not None
        if not held or not self.feed.request(
            endpoint, self._sequences[frame.sequence], frame.from_position
        ):
            self.dropped += 1

    def _notice(self, endpoint: DraftEndpoint, notice: Notice) -> None:
        if notice.kind is NoticeKind.LEAVING:
            endpoint.leaving = True
            for key in list(endpoint.sequences):
                self.leave(self._sequences[key], "leaving")
            return
        if notice.sequence not in endpoint.sequences:
            self.dropped += 1
            return
        state = self._sequences[notice.sequence]
        if notice.kind is NoticeKind.BUSY:
            endpoint.busy_until = self._now() + BUSY_SECONDS
        elif notice.kind is NoticeKind.REFUSED:
            state.refused_by.add(endpoint.link)
        # The endpoint may hold it for all that: the notice may have crossed with a new open.
        self.leave(state, notice.kind.name.lower())

    # What they hold

    def choose(self, state: SequenceSpeculation, length: int) -> DraftEndpoint | None:
        """The least occupied of those that may hold the sequence; its payoff has the last word.

        ``length``: of the speculation in flight.
        """
        chosen = self._least_occupied(state, length)
        if chosen is None:
            self._note_why_none(state)
            return None
        state.home = chosen.link
        if not chosen.payoff.attaches:
            state.why_detached = "does not pay"
            return None
        return chosen

    def _note_why_none(self, state: SequenceSpeculation) -> None:
        """Where nothing more is known: those that are up have no room for it, or none is up."""
        if state.why_detached in (DISCONNECTED, NO_ROOM):
            up = any(e.up and _allows(state.request, e) for e in self)
            state.why_detached = NO_ROOM if up else DISCONNECTED

    def _least_occupied(self, state: SequenceSpeculation, length: int) -> DraftEndpoint | None:
        request, now = state.request, self._now()
        needed = state.sequence.num_committed + self._options.depth
        fitting = [
            endpoint
            for endpoint in self
            if endpoint.has_room(now)
            and needed < endpoint.max_context
            and length <= endpoint.max_depth
            and endpoint.link not in state.refused_by
            and _allows(request, endpoint)
        ]
        paying = [endpoint for endpoint in fitting if endpoint.payoff.attaches]
        return min(paying or fitting, key=lambda endpoint: endpoint.occupancy(now), default=None)

    def leave(self, state: SequenceSpeculation, reason: str) -> None:
        """Detach, and tell the endpoint."""
        close = Close(state.sequence.id, max(0, state.session.round))
        self.held_by(state).outbox.append(close)
        self._detach(state, reason)

    def _detach(self, state: SequenceSpeculation, reason: str) -> None:
        endpoint = self.held_by(state)
        endpoint.sequences.discard(state.sequence.id)
        if not endpoint.sequences:
            endpoint.left()
        state.session.detach()
        self.feed.detach(state.sequence.id)
        state.why_detached = reason
        state.outcome_sent = True

    def check_integrity(self) -> None:
        held = {key: endpoint.link for endpoint in self for key in endpoint.sequences}
        attached = {k: s.session.link for k, s in self._sequences.items() if s.session.attached}
        if held != attached:
            raise RuntimeError("speculation integrity: endpoints and sequences do not agree")


def _has_broken(sender: FeatureSender) -> bool:
    """One that never came up is no reason to give up a link: the draft says what it misses."""
    return sender.came_up and sender.state is PlaneState.BROKEN


def _allows(request: SpeculationRequest, endpoint: DraftEndpoint) -> bool:
    """What a request does not name is the operator's own."""
    return endpoint.link in request.links if request.links else not endpoint.named
