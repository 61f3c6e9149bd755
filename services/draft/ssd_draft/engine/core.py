"""The draft's engine: follow the frames of all links, prepare speculations, push them.

A step is one forward for sequences of all links. Links take turns: none can fill a forward, or the
engine's attention, at the cost of another. Frames are looked at between two forwards.
"""

import time
from collections import deque
from collections.abc import Callable

from ssd_draft.config import DraftEngineOptions
from ssd_draft.engine.fair_scheduler import FairScheduler, LinkAccount
from ssd_draft.engine.planes import PlaneSenderOpener
from ssd_draft.planning.plan import Planner, RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.records import (
    AnnounceLeaving,
    DraftEngineStats,
    DraftOutput,
    LinkOutput,
    TargetFrames,
    TargetLinkDown,
    TargetLinkUp,
)
from ssd_draft.speculators.base import CannotSpeculate, Speculator
from ssd_draft.speculators.model import DraftRunner, ModelSpeculator
from ssd_draft.speculators.ngram import NgramSpeculator
from ssd_engine.kvcache.cached_path import NoRoom
from ssd_engine.kvcache.scopes import Scopes
from ssd_engine.speculation.frames import (
    Branches,
    Close,
    DraftFrame,
    Launch,
    Load,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Plane,
    Source,
    TargetFrame,
    Verification,
)
from ssd_engine.speculation.latency_model import StepClock
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tracing.events import NoTrace, Trace, TraceEventKind, make_trace
from ssd_engine.tracing.histogram import count_seconds, new_counts

SHIPPED = (Source.CACHE, Source.JUST_IN_TIME)  # speculations that were drawn here
OpenPlane = Callable[[TargetLinkUp], tuple[Sender, Plane] | None]
FRAMES_PER_STEP = 64  # frames of one link that are looked at between two forwards
ROUNDING = 1e-9
FRAME_SECONDS = 0.001  # for these, at most
IDLE_SECONDS = 30.0  # a sequence that was not heard of for so long may be evicted
ALIVE_SECONDS = 0.25  # without a push, after which an empty one says that work goes on
HOLD_BACK = 0.8  # share of the target's forward: before that only what is ready is pushed
PUSH_SHARE = 0.1  # likewise: pieces are gathered for so long


class LinkSequences:
    def __init__(self, link: int, planner: Planner, new_scope: Callable[[], int]) -> None:
        self.id = link
        self.planner = planner
        self.scopes: Scopes[int] = Scopes(new_scope)
        self.sequences: dict[int, DraftSequence] = {}
        self.sender: Sender | None = None  # the draft's end of the tensor plane
        self.inbox: deque[TargetFrame] = deque()
        self.account = LinkAccount()
        self.outbox: list[DraftFrame] = []
        self.consumed = 0


class Counters:
    def __init__(self) -> None:
        self.steps = self.rows = self.branches = self.branch_tokens = self.rounds = 0
        self.evictions = self.refusals = self.dropped_frames = 0
        self.builds, self.build_micros = new_counts(), 0

    def built(self, seconds: float) -> None:
        """A tree is complete, so long after the launch of its round."""
        count_seconds(self.builds, seconds)
        self.build_micros += int(seconds * 1e6)


class DraftCore:
    def __init__(
        self,
        speculator: Speculator,
        make_planner: Callable[[int], Planner],
        max_num_seqs: int,
        max_seqs_per_link: int | None,
        max_rows: int,
        prefill_chunk: int,
        open_plane: OpenPlane = lambda up: None,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
    ) -> None:
        """``make_planner`` gets the longest speculation that a target verifies."""
        self._speculator = speculator
        self._make_planner = make_planner
        self._max_num_seqs = max_num_seqs
        self._max_seqs_per_link = max_seqs_per_link or max_num_seqs
        self._max_rows = max_rows
        # A long prompt leaves room for others, and never overflows a forward.
        self._chunk = max(1, min(prefill_chunk, max_rows // 2))
        self._open_plane = open_plane
        self._now = clock
        self._trace = trace or NoTrace()
        self._links: dict[int, LinkSequences] = {}
        self._draining = False
        self._step_clock = StepClock()
        self._tree_clock = StepClock()  # only steps that are typical for trees
        self._shares = FairScheduler(max_rows, self._step_clock)
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return any(link.inbox or link.outbox or self._active(link) for link in self._links.values())

    def handle(
        self, record: TargetLinkUp | TargetFrames | TargetLinkDown | AnnounceLeaving
    ) -> None:
        match record:
            case TargetLinkUp():
                self._connect(record)
            case TargetFrames() if record.link in self._links:
                self._links[record.link].inbox.extend(record.frames)
            case TargetFrames():
                self.counters.dropped_frames += len(record.frames)
            case TargetLinkDown():
                self._disconnect(record.link)
            case AnnounceLeaving():
                self._draining = True
                for link in self._links.values():
                    self._announce(link)

    def _connect(self, up: TargetLinkUp) -> None:
        planner = self._make_planner(up.max_depth)
        link = self._links[up.link] = LinkSequences(up.link, planner, self._speculator.new_scope)
        opened = self._open_plane(up) if up.plane is not None else None
        if opened is not None:
            link.sender, plane = opened
            link.outbox.append(plane)
        if self._draining:
            self._announce(link)

    def _disconnect(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is None:
            return
        for sequence in list(link.sequences.values()):
            self._close(sequence, link)
        if link.sender is not None:
            link.sender.close()

    def step(self) -> DraftOutput:
        for link in self._links.values():
            self._look_at_frames(link)
        chosen, chunk = self._choose()
        if chosen:
            self._speculate(list(chosen), list(chosen.values()), chunk)
        for link in self._links.values():
            self._push(link)
        return DraftOutput(self._outputs(), self.load(), self.stats(), self._trace.take())

    # Frames

    def _look_at_frames(self, link: LinkSequences) -> None:
        begin = self._now()
        for _ in range(min(FRAMES_PER_STEP, len(link.inbox))):
            self._follow(link, link.inbox.popleft())
            link.consumed += 1
            if self._now() - begin > FRAME_SECONDS:
                break

    def _follow(self, link: LinkSequences, frame: TargetFrame) -> None:
        sequence = link.sequences.get(frame.sequence)
        if isinstance(frame, Open):
            self._open(link, frame)
        elif isinstance(frame, Close):
            if sequence is not None:
                self._close(sequence, link)
        elif sequence is None:
            self.counters.dropped_frames += 1
        else:
            self._move(link, sequence, frame)

    def _open(self, link: LinkSequences, frame: Open) -> None:
        """Opening what is open replaces it."""
        known = link.sequences.get(frame.sequence)
        if known is not None:
            self._close(known, link)
        sequence = DraftSequence(link.id, frame, self._now(), link.planner.depth)
        try:
            self._admit(link, sequence)
        except NoRoom as error:
            self._refuse(link, frame, NoticeKind.BUSY, str(error))
        except CannotSpeculate as error:
            self._refuse(link, frame, NoticeKind.REFUSED, str(error))
        else:
            link.sequences[sequence.id] = sequence

    def _admit(self, link: LinkSequences, sequence: DraftSequence) -> None:
        if self._draining:
            raise NoRoom("the endpoint is leaving")
        if len(link.sequences) >= self._max_seqs_per_link:
            raise NoRoom(f"this link has its {self._max_seqs_per_link} sequences")
        if self._num_sequences >= self._max_num_seqs and not self._evict_for(link, sequence):
            raise NoRoom(f"the endpoint has its {self._max_num_seqs} sequences")
        while True:
            try:
                return self._speculator.open(sequence, link.scopes.root_of(sequence.cache_scope))
            except NoRoom:
                if not self._evict_for(link, sequence):
                    raise

    def _refuse(
        self, link: LinkSequences, frame: TargetFrame, kind: NoticeKind, reason: str
    ) -> None:
        self.counters.refusals += 1
        link.outbox.append(Notice(frame.sequence, frame.round, kind, reason))

    def _move(self, link: LinkSequences, sequence: DraftSequence, frame: TargetFrame) -> None:
        if isinstance(frame, Outcome):
            self._learn(link, sequence, frame)
        elif isinstance(frame, Launch):
            self._ship(link, sequence, frame)
            if sequence.is_called_for:
                link.planner.observe_use(sequence, sequence.is_late(frame))
        self._trace_frame(frame)
        if not sequence.apply(frame, self._now()):
            # What the target believes of this sequence is not so: let it open it again.
            self.counters.dropped_frames += 1
            self._give_up(link, sequence, NoticeKind.LOST, "a frame did not fit its round")
            return
        if sequence.phase is DraftRoundPhase.VERIFYING:
            self.counters.rounds += 1
        try:
            self._grow(link, sequence)
        except NoRoom as error:
            self.counters.evictions += 1
            self._give_up(link, sequence, NoticeKind.BUSY, str(error))
        except CannotSpeculate as error:
            self._give_up(link, sequence, NoticeKind.REFUSED, str(error))

    def _grow(self, link: LinkSequences, sequence: DraftSequence) -> None:
        """Follow a frame; raises NoRoom where that takes more memory than can be had."""
        while True:
            try:
                return self._speculator.on_round_changed(sequence)
            except NoRoom:
                if not self._evict_to_grow(link, sequence):
                    raise

    def _trace_frame(self, frame: TargetFrame) -> None:
        about = {"sequence": frame.sequence, "round": frame.round}
        if isinstance(frame, Launch):
            self._trace.moment(TraceEventKind.LAUNCH, tokens=len(frame.speculation), **about)
        elif isinstance(frame, Outcome):
            self._trace.moment(TraceEventKind.OUTCOME, accepted=frame.accepted, **about)

    def _ship(self, link: LinkSequences, sequence: DraftSequence, launch: Launch) -> None:
        """Rejection: what the tokens that were taken were drawn from, hidden under the forward."""
        if link.sender is None or sequence.verification is not Verification.REJECTION:
            return
        offer = sequence.offers.get(sequence.decided or (-1, -1))
        count = len(launch.speculation)
        if launch.source not in SHIPPED or offer is None:
            return
        if launch.round != sequence.round + 1 or offer.tokens[:count] != launch.speculation:
            return
        rows = self._speculator.drawn_from(sequence, count)
        if rows is not None:
            link.sender.send_made(RowsKey(sequence.id, launch.round, 0), rows)

    def _learn(self, link: LinkSequences, sequence: DraftSequence, frame: Outcome) -> None:
        """What the rates of theorem 12 are measured from."""
        if sequence.phase is not DraftRoundPhase.VERIFYING or frame.round != sequence.round:
            return
        rank, ranked = self._speculator.rank(sequence, frame.accepted, frame.token)
        link.planner.observe(sequence, frame.accepted, rank, ranked)

    def _give_up(
        self, link: LinkSequences, sequence: DraftSequence, kind: NoticeKind, why: str
    ) -> None:
        self._close(sequence, link)
        link.outbox.append(Notice(sequence.id, sequence.round, kind, why))

    def _close(self, sequence: DraftSequence, link: LinkSequences | None) -> None:
        sequence.close()
        self._speculator.close(sequence)
        if link is not None:
            link.sequences.pop(sequence.id, None)

    def _announce(self, link: LinkSequences) -> None:
        link.outbox.append(Notice(0, 0, NoticeKind.LEAVING, "the endpoint drains"))

    # Room

    @property
    def _num_sequences(self) -> int:
        return sum(len(link.sequences) for link in self._links.values())

    def _evict_for(self, link: LinkSequences, sequence: DraftSequence) -> bool:
        """Make room for a sequence of ``link``: where nobody is harmed, or within fair shares.

        First a sequence of its own that has not been heard of for long; then, when the link stays
        within its share of places and memory, the least recent one of a link that holds more.
        """
        idle = self._least_recent(link)
        if idle is not None and self._now() - idle.changed_at > IDLE_SECONDS:
            self._evict(link, idle)
            return True
        share = 1 / max(1, len(self._links)) + ROUNDING
        largest = max(self._links.values(), key=self._held)
        if self._held(link) + self._weight(sequence) > share or self._held(largest) <= share:
            return False
        victim = self._least_recent(largest)
        if victim is None:
            return False
        self._evict(largest, victim)
        return True

    def _evict_to_grow(self, own: LinkSequences, sequence: DraftSequence) -> bool:
        """The youngest of the link that holds most, but not what is older than the sequence. A link
        beyond its share makes room for itself among its own."""
        share = 1 / max(1, len(self._links)) + ROUNDING
        links = [own] if self._held(own) > share else [*self._links.values()]
        for link in sorted(links, key=self._held, reverse=True):
            youngest = max(link.sequences.values(), key=lambda s: s.opened_at, default=sequence)
            if youngest is not sequence and youngest.opened_at >= sequence.opened_at:
                self._evict(link, youngest)
                return True
        return False

    def _held(self, link: LinkSequences) -> float:
        return sum(map(self._weight, link.sequences.values()))

    def _weight(self, sequence: DraftSequence) -> float:
        """What part of the endpoint it takes: of its places or of its memory, whichever is more."""
        return max(1 / self._max_num_seqs, self._speculator.memory_share(sequence))

    def _least_recent(self, link: LinkSequences) -> DraftSequence | None:
        return min(link.sequences.values(), key=lambda s: s.changed_at, default=None)

    def _evict(self, link: LinkSequences, sequence: DraftSequence) -> None:
        self.counters.evictions += 1
        self._give_up(link, sequence, NoticeKind.LOST, "evicted: the endpoint is full")

    # Work

    def _active(self, link: LinkSequences) -> bool:
        return any(not sequence.complete for sequence in link.sequences.values())

    def _choose(self) -> tuple[dict[DraftSequence, int], int]:
        """Sequences of the next forward, with their rows, and the longest piece of a prompt in it.

        Links that share it get equal parts of its rows. Of a link, what its target waits for comes
        first, then what has waited longest. The very first may be larger than its part.
        """
        links = {link.account: link for link in self._links.values()}
        active = [account for account, link in links.items() if self._active(link)]
        turn = self._shares.turn(links, active, self._now())
        chunk = max(1, min(self._chunk, turn.max_rows // 2))
        chosen: dict[DraftSequence, int] = {}
        left = turn.max_rows
        part = turn.max_rows // max(1, len(turn.sharing))
        for account in turn.sharing:
            left -= self._fill(chosen, links[account], part, chunk)
        for account in turn.sharing:  # what others left of their parts
            left -= self._fill(chosen, links[account], left, chunk)
        if turn.sharing and turn.joining:
            left = min(left, self._shares.rows_to_join(turn.max_rows - left))
        for account in turn.joining:
            left -= self._fill(chosen, links[account], left, chunk)
        return chosen, chunk

    def _fill(
        self, chosen: dict[DraftSequence, int], link: LinkSequences, room: int, chunk: int
    ) -> int:
        """Add sequences of a link; returns their rows."""
        taken = 0
        for sequence in _by_urgency(link):
            if sequence in chosen:
                continue
            rows = self._speculator.rows(sequence, chunk)
            if taken + rows <= room or not chosen:
                chosen[sequence] = rows
                taken += rows
        self._shares.charge(link.account, taken)
        return taken

    def _speculate(self, chosen: list[DraftSequence], rows_of: list[int], chunk: int) -> None:
        total = sum(rows_of)
        plans = [self._plan(s, total - rows) for s, rows in zip(chosen, rows_of, strict=True)]
        begin = self._now()
        rows = self._speculator.step(chosen, chunk, plans)
        now = self._now()
        self._step_clock.observe(rows, now - begin)
        if self._speculator.is_typical:
            self._tree_clock.observe(rows, now - begin)
        self._trace_step(chosen, begin, now, rows)
        self.counters.steps += 1
        self.counters.rows += rows
        for sequence in chosen:
            if sequence.completes_tree():
                self.counters.built(now - sequence.changed_at)

    def _trace_step(self, chosen: list[DraftSequence], begin: float, end: float, rows: int) -> None:
        first = chosen[0]
        awaited = any(sequence.phase is DraftRoundPhase.DECIDED for sequence in chosen)
        self._trace.span(
            TraceEventKind.FORWARD,
            begin,
            end,
            sequence=first.id if len(chosen) == 1 else 0,
            round=first.round if len(chosen) == 1 else 0,
            rows=rows,
            origin=Source.JUST_IN_TIME if awaited else Source.CACHE,
        )

    def _plan(self, sequence: DraftSequence, others: int) -> RoundPlan:
        """One for each round, made when it begins."""
        if sequence.plan is None:
            planner = self._links[sequence.link].planner
            sequence.plan = planner.plan(sequence, self._tree_clock, others)
            if sequence.phase is DraftRoundPhase.VERIFYING:
                sequence.planned = sequence.plan.depth
        plan: RoundPlan = sequence.plan
        return plan

    # Output

    def _push(self, link: LinkSequences) -> None:
        now = self._now()
        for sequence in link.sequences.values():
            due = self._push_pays(sequence, now) and sequence.push_is_due
            if not due and not self._is_silent(sequence, now):
                continue
            branches = sequence.pushes(now)
            self.counters.branches += sum(branch.start == 0 for branch in branches)
            tokens = sum(len(branch.tokens) for branch in branches)
            self.counters.branch_tokens += tokens
            link.outbox.append(Branches(sequence.id, sequence.round, branches))
            about = {"sequence": sequence.id, "round": sequence.round}
            self._trace.moment(TraceEventKind.PUSH, tokens=tokens, **about)

    def _is_silent(self, sequence: DraftSequence, now: float) -> bool:
        """A target takes an endpoint for dead that leaves its rounds without any answer."""
        if sequence.complete:
            return not sequence.answered
        return now - sequence.pushed_at > ALIVE_SECONDS

    def _push_pays(self, sequence: DraftSequence, now: float) -> bool:
        """A branch that is pushed in pieces costs both sides a message for each: about 1 ms.

        So pieces are gathered until all is ready, or until the target's forward, or its patience
        after that, may come to an end.
        """
        if sequence.ready or sequence.complete:
            return True
        verify = sequence.verify_seconds
        held = HOLD_BACK if sequence.phase is DraftRoundPhase.VERIFYING else HOLD_BACK / 2
        if now - sequence.changed_at < held * verify:
            return False
        return now - sequence.pushed_at >= PUSH_SHARE * verify

    def _outputs(self) -> list[LinkOutput]:
        outputs = []
        for link in self._links.values():
            if link.outbox or link.consumed:
                outputs.append(LinkOutput(link.id, link.outbox, link.consumed))
                link.outbox, link.consumed = [], 0
        return outputs

    def load(self) -> Load:
        return Load(
            open_sequences=self._num_sequences,
        )

    def stats(self) -> DraftEngineStats:
        counters = self.counters
        pool = self._speculator.pool if isinstance(self._speculator, ModelSpeculator) else None
        return DraftEngineStats(
            links=len(self._links),
            sequences=self._num_sequences,
            used_blocks=pool.num_used if pool else 0,
            reserved_blocks=pool.num_reserved if pool else 0,
            cached_blocks=pool.num_cached if pool else 0,
            steps=counters.steps,
            rows=counters.rows,
            branches=counters.branches,
            branch_tokens=counters.branch_tokens,
            rounds=counters.rounds,
            evictions=counters.evictions,
            refusals=counters.refusals,
            dropped_frames=counters.dropped_frames,
            builds=counters.builds,
            build_micros=counters.build_micros,
        )

    def check_integrity(self) -> None:
        self._speculator.check_integrity(self._num_sequences)
        for link in self._links.values():
            for key, sequence in link.sequences.items():
                if sequence.id != key or sequence.link != link.id:
                    raise RuntimeError("draft integrity: a sequence under a wrong name")
                if sequence.phase is DraftRoundPhase.CLOSED:
                    raise RuntimeError("draft integrity: a closed sequence is held")


def make_core(options: DraftEngineOptions, runner: DraftRunner | None) -> DraftCore:
    def make_planner(max_depth: int) -> Planner:
        depth = min(options.depth, max_depth)
        return Planner(depth, options.budget, options.fan_out_hit, options.fan_out_miss)

    speculator: Speculator = NgramSpeculator()
    if runner is not None:
        speculator = ModelSpeculator(
            runner,
            options.block_size,
            options.max_context,
            options.depth,
            options.budget,
            options.vocab_size,
        )
    return DraftCore(
        speculator,
        make_planner,
        options.max_num_seqs,
        options.max_seqs_per_link,
        options.max_rows,
        options.prefill_chunk,
        PlaneSenderOpener(options),
        trace=make_trace(options.trace_events > 0),
    )


def _by_urgency(link: LinkSequences) -> list[DraftSequence]:
    """Sequences with something to do."""
    waiting = [s for s in link.sequences.values() if not s.complete]
    return sorted(waiting, key=lambda s: (s.phase is not DraftRoundPhase.DECIDED, s.changed_at))
