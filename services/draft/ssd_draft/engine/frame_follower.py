"""Follows the frames of links: sequences open and close, rounds end and begin."""

from collections.abc import Callable

from ssd_draft.engine.link_sequences import Counters, LinkSequences
from ssd_draft.engine.sequence_room import SequenceRoom
from ssd_draft.planning.grammars import GrammarThread
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.speculators.base import CannotSpeculate, Speculator
from ssd_engine.kvcache.cached_path import NoRoom
from ssd_engine.speculation.frames import (
    Close,
    Launch,
    NoticeKind,
    Open,
    Outcome,
    Source,
    TargetFrame,
    Verification,
)
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tracing.events import Trace, TraceEventKind

DRAFTED_HERE = (Source.CACHE, Source.JUST_IN_TIME)
FRAMES_PER_STEP = 64  # frames of one link that are looked at between two forwards
FRAME_SECONDS = 0.001  # for these, at most


class FrameFollower:
    def __init__(
        self,
        speculator: Speculator,
        room: SequenceRoom,
        counters: Counters,
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        self._speculator, self._room = speculator, room
        self._counters, self._now, self._trace = counters, clock, trace
        self.leaving = False  # nothing new is opened
        self.grammars: GrammarThread | None = None  # where there is a tokenizer

    def follow_some(self, link: LinkSequences) -> None:
        """Follows as many frames as may be looked at between two forwards."""
        begin = self._now()
        for _ in range(min(FRAMES_PER_STEP, len(link.inbox))):
            self._follow(link, link.inbox.popleft())
            link.consumed += 1
            if self._now() - begin > FRAME_SECONDS:
                break

    def _follow(self, link: LinkSequences, frame: TargetFrame) -> None:
        sequence = link.sequences.get(frame.sequence)
        if isinstance(frame, Open | Close):
            if sequence is not None:  # an open takes the place of one of that number
                self._room.close(link, sequence)
            if isinstance(frame, Open):
                self._open(link, frame)
        elif sequence is None:
            self._counters.dropped_frames += 1
        else:
            self._change_round(link, sequence, frame)

    def _open(self, link: LinkSequences, frame: Open) -> None:
        grammar = frame.sampling.grammar
        pending = None if grammar is None or not self.grammars else self.grammars.start(grammar)
        sequence = DraftSequence(link.id, frame, self._now(), link.planner.depth, pending)
        try:
            if self.leaving:
                raise NoRoom("the endpoint is leaving")
            if link.features is not None and link.features.problem:
                raise CannotSpeculate(link.features.problem)
            self._room.admit(link, sequence)
            if link.features is not None:
                link.features.opened(sequence)
        except NoRoom as error:
            self._refuse(link, frame, NoticeKind.BUSY, str(error))
        except CannotSpeculate as error:
            self._refuse(link, frame, NoticeKind.REFUSED, str(error))

    def _refuse(
        self, link: LinkSequences, frame: TargetFrame, kind: NoticeKind, reason: str
    ) -> None:
        self._counters.refusals += 1
        link.notify(frame.sequence, frame.round, kind, reason)

    def _change_round(
        self, link: LinkSequences, sequence: DraftSequence, frame: TargetFrame
    ) -> None:
        if isinstance(frame, Outcome):
            if link.features is not None:
                link.features.round_ends(sequence, link.sequences)
            self._observe_outcome(link, sequence, frame)
        elif isinstance(frame, Launch):
            self._send_distributions(link, sequence, frame)
            if sequence.is_called_for:
                link.planner.observe_use(sequence, sequence.is_late(frame))
        self._trace_frame(frame)
        if not sequence.apply(frame, self._now()):
            # What the target believes of this sequence is not so: let it open it again.
            self._counters.dropped_frames += 1
            self._room.give_up(link, sequence, NoticeKind.LOST, "a frame did not fit its round")
            return
        if sequence.phase is DraftRoundPhase.VERIFYING:
            self._counters.rounds += 1
        try:
            self._room.grow(link, sequence)
        except NoRoom as error:
            self._counters.evictions += 1
            self._room.give_up(link, sequence, NoticeKind.BUSY, str(error))
        except CannotSpeculate as error:
            self._room.give_up(link, sequence, NoticeKind.REFUSED, str(error))

    def _trace_frame(self, frame: TargetFrame) -> None:
        about = {"sequence": frame.sequence, "round": frame.round}
        if isinstance(frame, Launch):
            self._trace.moment(TraceEventKind.LAUNCH, tokens=len(frame.speculation), **about)
        elif isinstance(frame, Outcome):
            self._trace.moment(TraceEventKind.OUTCOME, accepted=frame.accepted, **about)

    def _send_distributions(
        self, link: LinkSequences, sequence: DraftSequence, launch: Launch
    ) -> None:
        """Rejection: sends what the taken tokens were drawn from, hidden under the forward."""
        if link.sender is None or sequence.verification is not Verification.REJECTION:
            return
        branch, count = sequence.decided, len(launch.speculation)
        fits = (
            branch is not None
            and launch.source in DRAFTED_HERE
            and launch.round == sequence.round + 1
            and launch.speculation == branch.tokens[:count]
        )
        rows = self._speculator.draft_distributions(sequence, count) if fits else None
        if rows is not None:
            link.sender.send_made(RowsKey(sequence.id, launch.round), rows)

    def _observe_outcome(
        self, link: LinkSequences, sequence: DraftSequence, frame: Outcome
    ) -> None:
        """The rates of theorem 12 are measured here."""
        if sequence.phase is not DraftRoundPhase.VERIFYING or frame.round != sequence.round:
            return
        rank, ranked = self._speculator.rank(sequence, frame.accepted, frame.token)
        link.planner.observe(sequence, frame.accepted, rank, ranked)
