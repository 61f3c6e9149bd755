"""The draft's engine: follow the frames of all links, prepare speculations, push them.

A step is one forward for sequences of all links. Links take turns: none can fill a forward, or the
engine's attention, at the cost of another. Frames are looked at between two forwards.
"""

import time
from collections.abc import Callable

from ssd_draft.config import DraftEngineOptions
from ssd_draft.engine.branch_pusher import BranchPusher
from ssd_draft.engine.forward_planner import ForwardPlanner
from ssd_draft.engine.frame_follower import FrameFollower
from ssd_draft.engine.link_sequences import Counters, LinkSequences
from ssd_draft.engine.planes import open_features, open_plane
from ssd_draft.engine.sequence_room import SequenceRoom
from ssd_draft.engine.told_features import FeatureInbox, ToldFeatures
from ssd_draft.planning.grammars import GrammarThread
from ssd_draft.planning.plan import Planner, RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.records import (
    AnnounceLeaving,
    DraftEngineStats,
    DraftOutput,
    GrammarVocabulary,
    LinkOutput,
    TargetFrames,
    TargetLinkUp,
    ToEngine,
)
from ssd_draft.speculators.base import DraftRunner, Speculator
from ssd_draft.speculators.registry import make_speculator
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.speculation.frames import (
    Load,
    NoticeKind,
    Plane,
    Source,
)
from ssd_engine.speculation.latency_model import StepClock
from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_engine.tensor_plane.report import report_of
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tracing.events import NoTrace, Trace, TraceEventKind, make_trace
from ssd_serving.engine.records import LinkGone

OpenPlane = Callable[[TargetLinkUp], tuple[Sender, Plane] | None]
OpenFeatures = Callable[[TargetLinkUp, FeatureNeeds], tuple[FeatureInbox, Plane] | None]


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
        open_features: OpenFeatures = lambda up, needs: None,
    ) -> None:
        """``make_planner`` gets the longest speculation that a target verifies."""
        self._speculator = speculator
        self._make_planner = make_planner
        self._open_plane, self._open_features = open_plane, open_features
        self._now = clock
        self._trace = trace or NoTrace()
        self._links: dict[int, LinkSequences] = {}
        self._step_clock = StepClock()
        self._tree_clock = StepClock()  # only steps that are typical for trees
        self.counters = counters = Counters()
        self._room = SequenceRoom(
            speculator, self._links, max_num_seqs, max_seqs_per_link, counters, clock
        )
        self._follower = FrameFollower(speculator, self._room, counters, clock, self._trace)
        self._planner = ForwardPlanner(
            speculator, self._links, max_rows, prefill_chunk, self._step_clock, clock
        )
        self._pusher = BranchPusher(counters, clock, self._trace)

    @property
    def has_work(self) -> bool:
        return any(link.has_news or link.outbox or link.is_active for link in self._links.values())

    def handle(self, record: ToEngine) -> None:
        match record:
            case TargetLinkUp():
                self._connect(record)
            case TargetFrames() if record.link in self._links:
                self._links[record.link].inbox.extend(record.frames)
            case TargetFrames():
                self.counters.dropped_frames += len(record.frames)
            case LinkGone():
                self._disconnect(record.link)
            case GrammarVocabulary():
                about = (record.tokenizer, record.vocab_size, record.eos_token_ids)
                self._follower.grammars = GrammarThread(GrammarCompiler(*about))
            case AnnounceLeaving():
                self._follower.leaving = True
                for link in self._links.values():
                    _announce(link)

    def _connect(self, up: TargetLinkUp) -> None:
        planner = self._make_planner(up.max_depth)
        link = self._links[up.link] = LinkSequences(up.link, planner, self._speculator.new_scope)
        opened = self._open_plane(up) if up.plane is not None else None
        if opened is not None:
            link.sender, plane = opened
            link.outbox.append(plane)
        if self._speculator.features is not None:
            self._connect_features(link, up, self._speculator.features)
        if self._follower.leaving:
            _announce(link)

    def _connect_features(self, link: LinkSequences, up: TargetLinkUp, needs: FeatureNeeds) -> None:
        """Without a plane nothing can be told, and the sequences of the link are refused."""
        opened = self._open_features(up, needs)
        inbox = None if opened is None else opened[0]
        link.features = ToldFeatures(inbox, self._speculator, self._now)
        if opened is not None:
            link.outbox.append(opened[1])

    def _disconnect(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is None:
            return
        for sequence in list(link.sequences.values()):
            self._room.close(link, sequence)
        if link.sender is not None:
            link.sender.close()
        if link.features is not None:
            link.features.close()

    def step(self) -> DraftOutput:
        for link in self._links.values():
            self._follower.follow_some(link)
            if link.features is not None:
                self._take_features(link, link.features)
        chosen, chunk = self._planner.choose()
        if chosen:
            self._speculate(list(chosen), list(chosen.values()), chunk)
        for link in self._links.values():
            self._pusher.push(link)
        load = Load(open_sequences=self._room.num_sequences)
        return DraftOutput(self._outputs(), load, self.stats(), self._trace.take())

    def _take_features(self, link: LinkSequences, features: ToldFeatures) -> None:
        if features.problem:  # what was opened before that was known
            for sequence in list(link.sequences.values()):
                self._room.give_up(link, sequence, NoticeKind.REFUSED, features.problem)
        features.tell(link.sequences)
        self.counters.feature_rows += features.num_told
        self.counters.dropped_features += features.num_dropped
        self.counters.feature_rounds += features.num_rounds
        self.counters.late_feature_rounds += features.num_late
        features.num_told = features.num_dropped = features.num_rounds = features.num_late = 0
        link.outbox += features.requests
        features.requests = []

    def _speculate(self, chosen: list[DraftSequence], rows_each: list[int], chunk: int) -> None:
        total = sum(rows_each)
        plans = [self._plan(s, total - rows) for s, rows in zip(chosen, rows_each, strict=True)]
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
                self.counters.count_tree(now - sequence.changed_at)

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
        """The plan of a sequence's phase, made when it begins."""
        if sequence.plan is None:
            planner = self._links[sequence.link].planner
            sequence.plan = planner.plan(sequence, self._tree_clock, others)
            if sequence.phase is DraftRoundPhase.VERIFYING:
                sequence.planned_depth = sequence.plan.depth
        return sequence.plan

    def _outputs(self) -> list[LinkOutput]:
        outputs = []
        for link in self._links.values():
            if link.outbox or link.consumed:
                outputs.append(LinkOutput(link.id, link.outbox, link.consumed))
                link.outbox, link.consumed = [], 0
        return outputs

    def stats(self) -> DraftEngineStats:
        counters, pool = self.counters, self._speculator.pool
        return DraftEngineStats(
            links=len(self._links),
            sequences=self._room.num_sequences,
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
            feature_rows=counters.feature_rows,
            dropped_features=counters.dropped_features,
            feature_rounds=counters.feature_rounds,
            late_feature_rounds=counters.late_feature_rounds,
            planes=tuple(self._reports()),
        )

    def _reports(self) -> list[PlaneReport]:
        """Planes of all links."""
        reports: list[PlaneReport] = []
        for link in self._links.values():
            if isinstance(link.sender, Sender):
                reports.append(report_of(link.sender))
            if link.features is not None:
                reports += link.features.report()
        return reports

    def check_integrity(self) -> None:
        self._speculator.check_integrity(self._room.num_sequences)
        for link in self._links.values():
            for key, sequence in link.sequences.items():
                if sequence.id != key or sequence.link != link.id:
                    raise RuntimeError("draft integrity: a sequence under a wrong name")
                if sequence.phase is DraftRoundPhase.CLOSED:
                    raise RuntimeError("draft integrity: a closed sequence is held")


def make_core(
    options: DraftEngineOptions,
    runner: DraftRunner | HeadRunner | None,
    on_rows: Callable[[], None] = lambda: None,
) -> DraftCore:
    """``on_rows`` is called, in any thread, when a plane has brought rows."""

    def make_planner(max_depth: int) -> Planner:
        depth = min(options.depth, max_depth)
        return Planner(depth, options.budget, options.fan_out_hit, options.fan_out_miss)

    return DraftCore(
        make_speculator(options, runner),
        make_planner,
        options.max_num_seqs,
        options.max_seqs_per_link,
        options.max_rows,
        options.prefill_chunk,
        lambda up: open_plane(options, up),
        trace=make_trace(options.trace_events > 0),
        open_features=lambda up, needs: open_features(options, up, needs, on_rows),
    )


def _announce(link: LinkSequences) -> None:
    link.notify(0, 0, NoticeKind.LEAVING, "the endpoint drains")
