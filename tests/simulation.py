"""Target and drafts in one process, joined by links that the test controls: real engines, real
models, real frames, a clock of its own. Time passes only here, so a schedule can be repeated."""

import random
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.base import Speculator
from ssd_draft.speculators.head.speculator import HeadSpeculator
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_draft.speculators.ngram import NgramSpeculator
from ssd_engine.checkpoints.heads.head_config import HeadConfig
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Part
from ssd_engine.forward.result import ImmediateForward, Score
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.speculation.frames import Branch, Branches, DraftFrame, Notice, NoticeKind, Plane
from ssd_engine.tensor_plane.distributions import draft_distributions
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind, PlaneOffer
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey, check_rows
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_serving.engine.records import LinkGone
from ssd_target.engine.core import EngineCore
from ssd_target.records.engine_records import DraftFrames, DraftLinkDown, DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, SpeculationOptions
from ssd_target.scheduling.kept_kv import KeptOptions
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.head_drafter import HeadDrafter
from ssd_target.speculation.sync_drafter import Drafter, SyncDrafter
from tests.harness import BLOCK, Request, Result, run
from tests.synchronous import ByForward

VERIFY_SECONDS, STEP_SECONDS = 0.010, 0.001
DRAFT_DEPTH, DRAFT_BUDGET, DRAFT_ROWS = 8, 16, 256
HEAD_CONTEXT, HEAD_WINDOW = 512, 128


@dataclass
class Faults:
    """What may happen in a step of the target, each with its probability."""

    drop_link: float = 0.0  # frames in flight are lost, the next epoch comes later
    crash: float = 0.0  # the draft forgets everything
    freeze: float = 0.0  # the draft does nothing for a while
    duplicate: float = 0.0  # its pushes arrive twice
    hostile: float = 0.0  # frames that nobody asked for
    lost: float = 0.0  # it announces that it has dropped a sequence
    lose_rows: float = 0.0  # distributions of a round do not arrive (of each send)
    short: float = 0.0  # of KV blocks: a sequence is set aside
    # What befalls features on their way to a head (of each send).
    lose_features: float = 0.0
    delay_features: float = 0.0
    permute_features: float = 0.0
    corrupt_features: float = 0.0
    misplace_features: float = 0.0  # they are said to be another sequence's, or of other positions


@dataclass
class SimulatedDraft:
    link: int
    make: Callable[[], DraftCore]
    core: DraftCore
    epoch: int = 1
    up: bool = False
    frozen: int = 0  # steps
    down_for: int = 0  # steps of the target
    to_draft: deque[list[object]] = field(default_factory=deque)
    to_target: deque[DraftFrames] = field(default_factory=deque)
    seen: set[int] = field(default_factory=set)  # sequences


@dataclass
class SimulatedPlane:
    """Both ends of a tensor plane. Rows are kept when they are expected, as a real one does."""

    loses: Callable[[], bool]
    expected: dict[RowsKey, int] = field(default_factory=dict)
    rows: dict[RowsKey, Tensor] = field(default_factory=dict)

    def send_made(self, key: RowsKey, make: MakeRows) -> bool:
        rows = make()
        if self.expected.get(key) != len(rows) or self.loses():
            return False
        self.rows[key] = rows.clone()
        return True

    def expect(self, key: RowsKey, num_rows: int) -> None:
        self.expected[key] = num_rows

    def receive(self, key: RowsKey, num_rows: int, seconds: float) -> Tensor | None:
        self.expected.pop(key, None)
        return self.rows.pop(key, None)

    def close(self) -> None:
        self.expected.clear()
        self.rows.clear()


class SimulatedFeatures:
    """Both ends of the plane by which a head is told. What is sent may come late, or otherwise."""

    came_up, reason, state = True, "", PlaneState.UP

    def __init__(self, simulation: "Simulation", needs: FeatureNeeds) -> None:
        self._simulation, self.stream = simulation, told_features(needs)
        self._coming: list[tuple[float, RowsKey, Tensor]] = []

    def has_room(self, num_rows: int) -> bool:
        return True

    def send_made(
        self, key: RowsKey, make: MakeRows, num_rows: int = 0, complete: bool = False
    ) -> bool:
        rows = make()
        check_rows(self.stream, rows)
        sent = self._simulation.befall_features(key, rows)
        if sent is not None:
            self._coming.append(sent)
        return sent is not None

    def __len__(self) -> int:
        return sum(due <= self._simulation.now for due, _, _ in self._coming)

    def take(self, max_bytes: int) -> list[tuple[RowsKey, Tensor]]:
        now = self._simulation.now
        come = [(key, rows) for due, key, rows in self._coming if due <= now]
        self._coming = [each for each in self._coming if each[0] > now]
        return come

    def close(self) -> None:
        self._coming.clear()


class Watched(ByForward):
    """A target whose hidden states can be watched."""

    def __init__(
        self, target: ModelRunner, num_blocks: int, forward: Callable[..., Tensor | None]
    ) -> None:
        super().__init__(num_blocks, forward)
        self._target = target

    @property
    def features(self) -> Tensor | None:
        return self._target.features

    def prepare_watch(self, boundaries: Rows[int]) -> bool:
        return self._target.prepare_watch(boundaries)

    def watch(self, boundaries: Rows[int]) -> None:
        self._target.watch(boundaries)

    def beside_forwards(self) -> AbstractContextManager[object]:
        return nullcontext()

    def step(self, parts: Rows[Any], draws: Rows[Any], *launched: Any) -> ImmediateForward:
        return ImmediateForward(lambda: self.forward(parts, *launched), lambda: self.features)


class FewBlocks:
    """A runner whose cache has room for fewer blocks than it was made for."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self._runner, self.num_blocks = runner, num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def is_head(runner: ModelRunner) -> bool:
    return hasattr(runner, "step_with_features")


def needs_of(head: Any) -> FeatureNeeds:
    config: HeadConfig = head._config
    return FeatureNeeds(config.boundaries or (), config.target_hidden_size, "float32")


def make_speculator(runner: ModelRunner | None, budget: int, vocab_size: int) -> Speculator:
    if runner is None:
        return NgramSpeculator()
    if not is_head(runner):
        return ModelSpeculator(runner, BLOCK, 2048, DRAFT_DEPTH, budget, vocab_size)
    head: Any = runner
    about = (BLOCK, HEAD_CONTEXT, DRAFT_DEPTH, budget, vocab_size, HEAD_WINDOW)
    return HeadSpeculator(head, needs_of(head), *about)


class Simulation:
    """The draft makes ``draft_steps`` steps (drawn for each forward) while the target verifies."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner | Rows[ModelRunner | None] | None,
        options: SpeculationOptions,
        seed: int = 0,
        draft_steps: tuple[int, int] = (8, 8),
        faults: Faults | None = None,
        sync: bool | ModelRunner = False,
        fan_out: tuple[int, ...] | None = None,
        budget: int = DRAFT_BUDGET,
        token_bytes: list[bytes] | None = None,
        max_num_seqs: int = 64,
        trusted: bool = False,
        make_planner: Callable[[], Planner] | None = None,
        kept: KeptOptions | None = None,
        feature_window: int = 1024,
        keep_features: int = 0,
        prefill_chunk: int = 128,
        replay_rows: int = 0,
    ) -> None:
        """``draft``: of all links, or of each; None looks up. Those that share one spoil each
        other's cache. ``sync``: the target has a draft model as well, the first one or its own.

        ``trusted``: the drafts', with rejection verification; a plane joins each of them.
        ``keep_features``: bytes, for those of cached blocks.
        """
        runners = [*draft] if isinstance(draft, Rows) else [draft]
        own = sync if isinstance(sync, ModelRunner) else runners[0]
        self.now = 0.0
        self.trusted = trusted
        self.planes: list[SimulatedPlane] = []
        self.feature_planes: list[SimulatedFeatures] = []
        self.befallen: Counter[str] = Counter()  # drafts, links and sends of features, by what
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self._draft_steps = draft_steps
        self._target = target
        self.vocab_size = target.config.vocab_size
        drafter: Drafter | None = None
        inside: tuple[int, ...] = ()
        if sync and own is not None and is_head(own):
            drafter = HeadDrafter(own, BLOCK, HEAD_CONTEXT, options.depth, 128)  # type: ignore[arg-type]
            inside = needs_of(own).boundaries
        elif sync and own is not None:
            drafter = SyncDrafter(own, BLOCK, 2048, options.depth, 128)
        kinds = FeatureOptions(target.config.hidden_size, feature_window, keep_bytes=keep_features)
        self.speculator = SpeculationCoordinator(
            options,
            self.vocab_size,
            send=self._send,
            receive=self._receive,
            stalled=lambda link, epoch, reason: self._lose(self.drafts[link]),
            drafter=drafter,
            open_plane=lambda up, plane: self.planes[int(plane.answer.address)],  # type: ignore[arg-type, return-value]
            clock=lambda: self.now,
            open_features=lambda up, plane: self.feature_planes[int(plane.answer.address)],
            feed=FeatureFeed(kinds, inside),
        )
        runner = Watched(target, target.num_blocks, self.forward)
        if kept is not None:
            runner.swap = target.swap  # type: ignore[method-assign]
            target.host_copies.allocate(kept.num_blocks)
        self.core = EngineCore(
            runner,
            token_bytes or [b""] * self.vocab_size,
            BLOCK,
            max_num_seqs,
            prefill_chunk,
            self.speculator,
            replay_rows,
            kept=kept,
        )

        self._make_room = self.core.scheduler._make_room
        self.core.scheduler._make_room = self._make_more_room  # type: ignore[method-assign]

        def planner() -> Planner:
            return Planner(DRAFT_DEPTH, budget, fan_out, fan_out)

        def make(runner: ModelRunner | None) -> DraftCore:
            return DraftCore(
                make_speculator(runner, budget, self.vocab_size),
                lambda depth: (make_planner or planner)(),
                64,
                None,
                DRAFT_ROWS,
                128,
                open_plane=self._open_plane,  # type: ignore[arg-type]
                clock=lambda: self.now,
                open_features=self._open_features,
            )

        self.needs = [
            needs_of(each) if each is not None and is_head(each) else None for each in runners
        ]
        self.drafts = [
            SimulatedDraft(i, partial(make, runner), make(runner))
            for i, runner in enumerate(runners)
        ]
        for each in self.drafts:
            self._connect(each)

    def run(self, requests: list[Request], stagger: int = 0) -> list[Result]:
        """By its own clock: measured time would decide how long is waited, and no two runs be
        alike."""
        clock = SimpleNamespace(monotonic=lambda: self.now)
        with patch("ssd_engine.forward.result.time", clock):
            return run(self.core, requests, stagger)

    def _make_more_room(self) -> list[Sequence]:
        """The target's scheduler sets aside whom it must, and perhaps another one."""
        set_aside, scheduler = self._make_room(), self.core.scheduler
        others = [*scheduler._running.values()][1:]
        if others and self._happens(self.faults.short):
            set_aside.append(self.rng.choice(others))
            scheduler._set_aside(set_aside[-1])
        return set_aside

    # The target's runner

    def forward(
        self, parts: Rows[Part], launched: Callable[[], None], score: Score | None = None
    ) -> Tensor | None:
        launched()
        begin = self.now
        for draft in self.drafts:
            steps = self.rng.randint(*self._draft_steps)
            for i in range(steps):
                self.now = begin + VERIFY_SECONDS * i / max(1, steps - 1)
                self._step(draft)
        self.now = begin + VERIFY_SECONDS
        self._deliver()
        self._misbehave()
        return self._target.forward(parts, score=score)

    # Links

    def _send(self, link: int, epoch: int, frames: list[object]) -> None:
        draft = self.drafts[link]
        if draft.up and draft.epoch == epoch:
            draft.to_draft.append(frames)
            draft.seen.update(frame.sequence for frame in frames)  # type: ignore[attr-defined]

    def _receive(self, seconds: float) -> bool:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_SECONDS
            for draft in self.drafts:
                self._step(draft)
            if self._deliver():
                return True
        return False

    def _step(self, draft: SimulatedDraft) -> None:
        if draft.frozen:
            draft.frozen -= 1
            return
        while draft.to_draft:
            draft.core.handle(TargetFrames(draft.epoch, draft.to_draft.popleft()))  # type: ignore[arg-type]
        output = draft.core.step()
        draft.core.check_integrity()
        for link in output.links:
            if draft.up and link.link == draft.epoch and link.frames:
                draft.to_target.append(
                    DraftFrames(draft.link, draft.epoch, link.frames, output.load)
                )

    def _deliver(self) -> bool:
        """Frames of different drafts, and of one in repetition, in any order that links allow."""
        delivered = False
        for draft in self.drafts:
            while draft.to_target:
                frames = draft.to_target.popleft()
                self.core.handle_link(frames)
                if self.rng.random() < self.faults.duplicate:
                    self.core.handle_link(frames)
                delivered = True
        return delivered

    def _connect(self, draft: SimulatedDraft) -> None:
        draft.up = True
        offer = PlaneOffer(()) if self.trusted else None
        told = PlaneOffer(())
        draft.core.handle(TargetLinkUp(draft.epoch, DRAFT_DEPTH, draft.epoch, offer, "", told))
        needs = self.needs[draft.link]
        terms = None if needs is None else FeatureTerms(needs)
        about = (64, 2048, DRAFT_DEPTH, "", self.trusted, terms)
        self.core.handle_link(DraftLinkUp(draft.link, draft.epoch, False, *about))
        if self.trusted:  # what is opened before the plane is known is opened coupled
            self._step(draft)
            self._deliver()

    def _open_plane(self, up: TargetLinkUp) -> tuple[SimulatedPlane, Plane]:
        self.planes.append(SimulatedPlane(lambda: self._happens(self.faults.lose_rows)))
        place = str(len(self.planes) - 1)
        stream = draft_distributions(1, DRAFT_DEPTH)  # nobody looks at it
        return self.planes[-1], Plane(0, 0, PlaneAnswer(PlaneKind.TCP, place, b"", stream))

    def _open_features(
        self, up: TargetLinkUp, needs: FeatureNeeds
    ) -> tuple[SimulatedFeatures, Plane]:
        self.feature_planes.append(SimulatedFeatures(self, needs))
        place = str(len(self.feature_planes) - 1)
        answer = PlaneAnswer(PlaneKind.TCP, place, b"", self.feature_planes[-1].stream)
        return self.feature_planes[-1], Plane(0, 0, answer)

    def befall_features(self, key: RowsKey, rows: Tensor) -> tuple[float, RowsKey, Tensor] | None:
        """When they come, and as what; None: never."""
        faults, due = self.faults, self.now
        if self._happens(faults.lose_features):
            self.befallen["lost"] += 1
            return None
        if self._happens(faults.delay_features):
            self.befallen["delayed"] += 1
            due += self.rng.choice([0.5, 1, 2, 5]) * VERIFY_SECONDS
        if len(rows) > 1 and self._happens(faults.permute_features):
            self.befallen["permuted"] += 1
            rows = rows[self.rng.sample(range(len(rows)), len(rows))]
        if self._happens(faults.corrupt_features):
            self.befallen["corrupted"] += 1
            rows = self._corrupted(rows)
        if self._happens(faults.misplace_features):
            self.befallen["misplaced"] += 1
            others = [*sorted(self.speculator._sequences), key.sequence, 10**6]
            start = max(0, key.round + self.rng.choice([-3, -1, 0, 0, 1, 40]))
            key = RowsKey(self.rng.choice(others), start)
        return due, key, rows

    def _corrupted(self, rows: Tensor) -> Tensor:
        value = self.rng.choice([float("nan"), float("inf"), 3e38, -1e4, 0.0])
        changed = rows.clone()
        changed[self.rng.randrange(len(rows))] = value
        return changed

    def _lose(self, draft: SimulatedDraft) -> None:
        if not draft.up:
            return
        draft.up = False
        draft.down_for = self.rng.randint(0, 3)
        draft.to_draft.clear()
        draft.to_target.clear()
        draft.core.handle(LinkGone(draft.epoch))
        self.core.handle_link(DraftLinkDown(draft.link, draft.epoch))

    # Faults

    def _misbehave(self) -> None:
        for draft in self.drafts:
            if not draft.up:
                self._reconnect(draft)
                continue
            if self._happens(self.faults.crash):
                self.befallen["crashed"] += 1
                self._lose(draft)
                draft.core = draft.make()
            elif self._happens(self.faults.drop_link):
                self.befallen["link broken"] += 1
                self._lose(draft)
            elif self._happens(self.faults.freeze):
                self.befallen["stopped"] += 1
                draft.frozen = self.rng.randint(1, 30)
            if draft.up and self._happens(self.faults.lost) and draft.seen:
                sequence = self.rng.choice(sorted(draft.seen))
                self._inject(draft, Notice(sequence, 0, NoticeKind.LOST, "a test"))
            if draft.up and self._happens(self.faults.hostile):
                self._inject(draft, self._hostile_frame(draft))

    def _reconnect(self, draft: SimulatedDraft) -> None:
        draft.down_for -= 1
        if draft.down_for <= 0:
            draft.epoch += 1
            self._connect(draft)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def _inject(self, draft: SimulatedDraft, frame: DraftFrame) -> None:
        epoch = draft.epoch - self.rng.randint(0, 1)
        self.core.handle_link(DraftFrames(draft.link, epoch, [frame], None))

    def _hostile_frame(self, draft: SimulatedDraft) -> DraftFrame:
        rng = self.rng
        sequence = rng.choice([*sorted(draft.seen), 10**6])
        state = self.speculator._sequences.get(sequence)
        current = state.session.round if state else 0
        branches = [
            Branch(
                rng.randint(0, 6),
                rng.randint(0, 2 * self.vocab_size),
                rng.choice([0, 0, 1, 5]),
                [rng.randint(0, int(1.2 * self.vocab_size)) for _ in range(rng.randint(0, 12))],
            )
            for _ in range(rng.randint(1, 40))
        ]
        return Branches(sequence, max(0, current + rng.choice([-1, 0, 0, 1])), branches)
