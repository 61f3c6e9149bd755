"""Targets and drafts small enough that everything they can do together can be tried.

The engines are the real ones: EngineCore with its scheduler and its Speculator on one side,
DraftCore with its sequences on the other. Only the models are toys. The target's next token is a
hash of all tokens before it, read back from a paged cache of tokens, so a cache that holds a wrong
token shows. The draft knows that hash, and at some places errs on purpose. A token thus tells from
which text it was computed: a branch made for another text than the one that it is used for shows,
too.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product
from typing import Any

import msgspec

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner, RoundPlan
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence, PreparedBranch
from ssd_draft.records import AnnounceLeaving, TargetFrames, TargetLinkUp
from ssd_draft.speculators.base import ReadsNoFeatures
from ssd_engine.forward.result import ForwardResult
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Branches, DraftFrame, Load, TargetFrame
from ssd_engine.speculation.speculation import accepted_path
from ssd_engine.tensor_plane.protocol.rows import MakeRows
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_serving.engine.records import LinkGone
from ssd_target.engine.core import EngineCore
from ssd_target.links import link_state
from ssd_target.records.engine_records import (
    Cancel,
    DraftFrames,
    DraftLinkDown,
    DraftLinkUp,
    Submit,
)
from ssd_target.records.speculation_options import (
    Backup,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.scheduling.verifier import RoundOutcome
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator
from tests.synchronous import ByForward

VOCAB = 1 << 20
BLOCK, NUM_BLOCKS = 32, 4
PREFILL_CHUNK = 2
WAIT_SECONDS = 0.5
LINK_TIMEOUT = 2.0
STALL_SECONDS = 3.0
CALM_SECONDS = 1.5
LONGER = 16  # tokens
SAMPLING = SamplingParams(seed=0, temperature=0.0)

Action = tuple[Any, ...]
Text = tuple[int, ...]
Arrivals = tuple[tuple[int, int, int, int], ...]  # link, epoch, sequence, number of messages


# The toy language


@lru_cache(1 << 16)
def true_token(text: Text) -> int:
    """What the target says after a text; never a token that the draft says when it errs."""
    return 4 * (zlib.crc32(array("I", text).tobytes()) % (VOCAB // 4))


@lru_cache(1 << 16)
def guesses(text: Text) -> Text:
    """The draft's candidates, best first: right, right at second sight, or wrong."""
    true = true_token(text)
    kind = zlib.crc32(array("I", text).tobytes(), 1) % 4
    if kind <= 1:
        return true, true + 1
    return (true + 1, true) if kind == 2 else (true + 1, true + 2)


def continued(text: Text, count: int) -> Text:
    """What the draft says after a text."""
    end = len(text) + count
    while len(text) < end:
        text += guesses(text)[:1]
    return text[end - count :] if count else ()


@lru_cache(1 << 10)
def plain(prompt: Text, count: int) -> Text:
    """Plain decoding."""
    text = prompt
    for _ in range(count):
        text += (true_token(text),)
    return text[len(prompt) :]


class ToySpeculator(ReadsNoFeatures):
    """One depth of all branches with every step."""

    is_typical = True
    pool = None

    def __init__(self) -> None:
        self.num_open = 0

    def new_scope(self) -> int:
        return 0

    def open(self, sequence: DraftSequence, scope: int) -> None:
        self.num_open += 1

    def memory_share(self, sequence: DraftSequence) -> float:
        return 0.0

    def on_round_changed(self, sequence: DraftSequence) -> None:
        pass

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        return int(not sequence.complete)

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        for sequence, plan in zip(sequences, plans, strict=True):
            if sequence.phase is DraftRoundPhase.VERIFYING and not sequence.branches:
                self._start_branches(sequence, plan)
            for branch in sequence.branches.values():
                if len(branch.tokens) < plan.depth:
                    text = _text_before(sequence, branch)
                    branch.tokens.append(guesses((*text, *branch.tokens))[0])
            depths = [len(branch.tokens) for branch in sequence.branches.values()]
            sequence.complete = min(depths, default=plan.depth) >= plan.depth
        return len(sequences)

    def _start_branches(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        chain = sequence.speculation
        for accepted, width in enumerate(plan.fan_out):
            text = (*sequence.prompt, *sequence.output, *chain[:accepted])
            wrong = chain[accepted : accepted + 1]
            candidates = [token for token in guesses(text) if token not in wrong]
            for token in candidates[:width]:
                sequence.branches[accepted, token] = PreparedBranch(accepted, token)

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        return None, 0

    def draft_distributions(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        return None

    def close(self, sequence: DraftSequence) -> None:
        self.num_open -= 1

    def check_integrity(self, num_sequences: int) -> None:
        if self.num_open != num_sequences:
            raise RuntimeError("toy integrity: a sequence was not opened or closed once")


def _text_before(sequence: DraftSequence, branch: PreparedBranch) -> Text:
    committed = (*sequence.prompt, *sequence.output)
    if sequence.phase is DraftRoundPhase.DECIDED:
        return committed
    return (*committed, *sequence.speculation[: branch.accepted], branch.token)


def toy_verify(works: list[Work], scored: ForwardResult, *_: object) -> list[RoundOutcome]:
    """In place of the verifier's: there are no logits here, only what the target says."""
    drawn: Any = scored.logits
    rows = iter(drawn)
    outcomes = []
    for work in works:
        own = list(islice(rows, work.chunk.num_logits))
        path = accepted_path(work.speculation, own)
        outcomes.append(RoundOutcome(path, own[: len(path) + 1], None))
    return outcomes


# The world


@dataclass(frozen=True)
class Setting:
    """What there is, and what may happen to it."""

    name: str
    prompts: tuple[tuple[int, Text], ...]  # of each sequence: its target and its prompt
    links: tuple[tuple[int, int], ...] = ((0, 0),)  # of each: its target and its draft
    depth: int = 1
    fan_out: Text = (1, 1)
    max_tokens: int = 3
    num_faults: int = 1
    faults: frozenset[str] = frozenset()
    wait: int = 0  # things that may happen while a target waits for a branch; 0: it never does
    draft_room: int = 8  # sequences

    @property
    def num_targets(self) -> int:
        return 1 + max(target for target, _ in self.links)

    @property
    def num_drafts(self) -> int:
        return 1 + max(draft for _, draft in self.links)


class Wrong(Exception):
    """A state that must not be."""


class NeedsChoice(Exception):
    """A target waits: what happens next?"""

    def __init__(self, choices: list[Action]) -> None:
        super().__init__()
        self.choices = choices


@dataclass
class Pipe:
    """One epoch of a link. Its two ends learn of its end each in its own time.

    Messages of one sequence stay in order; those of different sequences need not.
    """

    link: int
    epoch: int
    target_up: bool = True
    draft_up: bool = True
    down: dict[int, list[list[TargetFrame]]] = field(default_factory=dict)
    up: dict[int, list[tuple[DraftFrame, Load]]] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return not (self.target_up and self.draft_up)

    @property
    def number(self) -> int:
        """The draft's name for it, never used again."""
        return 100 * self.link + self.epoch


class Target:
    """A target's engine, the cache of its toy model, and what its clients have got."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.num_blocks = NUM_BLOCKS
        self.texts: dict[int, list[int]] = {}  # by sequence
        self.finished: set[int] = set()
        self.start()

    def start(self) -> None:
        setting = self.world.setting
        self.slots: dict[int, int] = {}
        self.base: dict[int, tuple[Text, Text]] = {}  # what each round verifies, and after what
        self.script: deque[Action] = deque()  # what happens during the wait of a step
        options = SpeculationOptions(
            depth=setting.depth,
            adapt_depth=False,
            backup=Backup.JUST_IN_TIME if setting.wait else Backup.NONE,
            wait_seconds=WAIT_SECONDS if setting.wait else 0.0,
            auto_off=False,
            link_timeout=LINK_TIMEOUT,
        )
        self.speculator = SpeculationCoordinator(
            options,
            VOCAB,
            send=self.send,
            receive=self.receive,
            stalled=self.stalled,
            clock=self.world.clock,
        )
        self.core = EngineCore(
            ByForward(self.num_blocks, self.forward),
            NoBytes(),  # type: ignore[arg-type]
            BLOCK,
            8,
            PREFILL_CHUNK,
            self.speculator,
            verify=toy_verify,  # type: ignore[arg-type]
        )

    def submit(self, sequence: int) -> None:
        setting = self.world.setting
        request = SpeculationRequest(Mode.SSD, depth=setting.depth)
        self.core.handle(
            Submit(
                sequence,
                pack_tokens(list(setting.prompts[sequence][1])),
                pack_tokens(self.texts.setdefault(sequence, [])),
                SAMPLING,
                StopRules(setting.max_tokens),
                None,
                request,
            )
        )

    @property
    def has_work(self) -> bool:
        """After it has heard of something an engine steps at least once more."""
        unsent = any(endpoint.outbox for endpoint in self.speculator.endpoints)
        return self.core.has_work or unsent

    def step(self) -> None:
        for delta in self.core.step().deltas:
            self.texts[delta.sequence] += delta.tokens
            if delta.finished:
                self.finished.add(delta.sequence)

    # The toy model

    def forward(
        self, parts: Sequence[Any], launched: Callable[[], None], *_: Any
    ) -> list[int] | None:
        launched()
        drawn: list[int] = []
        for part in parts:
            for i, token in enumerate(part.tokens, part.start):
                self.slots[_slot(part.blocks, i)] = token
            for end in range(part.end - part.num_logits + 1, part.end + 1):
                text = tuple(self.slots[_slot(part.blocks, i)] for i in range(end))
                drawn.append(true_token(text))
        for state in self.speculator._sequences.values():
            self._remember(state, parts)
        return drawn or None

    def _remember(self, state: Any, parts: Sequence[Any]) -> None:
        """What the round in flight verifies: what branches for its outcomes must continue."""
        sequence = state.sequence
        text = tuple(sequence.committed())
        for part in parts:
            if part.blocks is sequence.blocks and part.num_logits:
                chain = part.tokens[1:] if state.row.speculation else ()
                self.base[sequence.id] = (text, tuple(chain))

    # Links

    def send(self, link: int, epoch: int, frames: list[TargetFrame]) -> None:
        pipe = self.world.pipe(link, epoch)
        if pipe is None or pipe.broken:
            return
        for sequence in dict.fromkeys(frame.sequence for frame in frames):
            own = [frame for frame in frames if frame.sequence == sequence]
            pipe.down.setdefault(sequence, []).append(own)

    def receive(self, seconds: float) -> bool:
        """Whatever happens until a frame comes or time is up."""
        while True:
            if not self.script:
                raise NeedsChoice(self.world.during_wait())
            action = self.script.popleft()
            if action[0] == "time is up":
                return False
            self.world.apply(action)
            if action[0] in ("up", "notice", "drop"):
                return True

    def stalled(self, link: int, epoch: int, reason: str) -> None:
        self.world.close_target_end(link, epoch)


class NoBytes:
    """Tokens of the toy language spell nothing."""

    def __getitem__(self, token: int) -> bytes:
        return b""


def _slot(blocks: Sequence[int], position: int) -> int:
    return blocks[position // BLOCK] * BLOCK + position % BLOCK


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.faults_left = setting.num_faults
        self.waited = 0  # things that happened during the wait of the step in progress
        self.pipes: list[Pipe] = []
        self.epochs = [0] * len(setting.links)
        self.link_states = [link_state.DraftLinkState.CONNECTING] * len(setting.links)
        self.targets = [Target(self, i) for i in range(setting.num_targets)]
        self.drafts = [self._new_draft() for _ in range(setting.num_drafts)]
        for link in range(len(setting.links)):
            self._connect(link)
        for sequence, (target, _) in enumerate(setting.prompts):
            self.targets[target].submit(sequence)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "setting"}

    def clock(self) -> float:
        return self.now

    def _new_draft(self) -> DraftCore:
        return DraftCore(
            ToySpeculator(),
            self.make_planner,
            self.setting.draft_room,
            None,
            256,
            PREFILL_CHUNK,
            clock=self.clock,
        )

    def make_planner(self, depth: int) -> Planner:
        return Planner(self.setting.depth, 8, self.setting.fan_out, self.setting.fan_out)

    def pipe(self, link: int, epoch: int) -> Pipe | None:
        return next((p for p in self.pipes if (p.link, p.epoch) == (link, epoch)), None)

    def target_of(self, pipe: Pipe) -> Target:
        return self.targets[self.setting.links[pipe.link][0]]

    def draft_of(self, pipe: Pipe) -> DraftCore:
        return self.drafts[self.setting.links[pipe.link][1]]

    # What can happen

    # An engine looks at what has come when it steps, and at nothing in between: a message that
    # arrives earlier is as good as one that arrives then. So arrivals are a part of steps.

    def actions(self) -> list[Action]:
        steps: list[Action] = [
            ("target", target.number, arrivals)
            for target in self.targets
            if target.has_work
            for arrivals in self._to_target(target.number)
        ]
        return steps + self._around_targets()

    def during_wait(self) -> list[Action]:
        """While a target waits for a branch it hears of its links, and of nothing else."""
        if self.waited >= self.setting.wait:
            return [("time is up",)]
        deaf = ("crash target", "cancel")
        around = [action for action in self._around_targets() if action[0] not in deaf]
        arriving = [
            ("up", pipe.link, pipe.epoch, sequence)
            for pipe in self.pipes
            for sequence, queue in pipe.up.items()
            if queue
        ]
        return [("time is up",), *around, *arriving]

    def _around_targets(self) -> list[Action]:
        actions: list[Action] = []
        for number, draft in enumerate(self.drafts):
            actions += (
                ("draft", number, arrivals)
                for arrivals in self._to_draft(number)
                if arrivals or draft.has_work
            )
        for pipe in self.pipes:
            if pipe.broken and (pipe.target_up or pipe.draft_up):
                actions.append(("notice", pipe.link, pipe.epoch))
        for link in range(len(self.setting.links)):
            if self._can_connect(link):
                actions.append(("connect", link))
        if self.faults_left:
            actions += (fault for fault in self._faults() if fault[0] in self.setting.faults)
        return actions

    def _to_draft(self, number: int) -> Iterator[Arrivals]:
        return _arrivals(
            (pipe.link, pipe.epoch, sequence, len(queue))
            for pipe in self.pipes
            if pipe.draft_up and self.setting.links[pipe.link][1] == number
            for sequence, queue in pipe.down.items()
        )

    def _to_target(self, number: int) -> Iterator[Arrivals]:
        return _arrivals(
            (pipe.link, pipe.epoch, sequence, len(queue))
            for pipe in self.pipes
            if self.setting.links[pipe.link][0] == number
            for sequence, queue in pipe.up.items()
        )

    def _can_connect(self, link: int) -> bool:
        waiting = self.link_states[link] is link_state.DraftLinkState.WAITING
        return waiting and not self.drafts[self.setting.links[link][1]]._follower.leaving

    def _faults(self) -> Iterator[Action]:
        for pipe in self.pipes:
            name = (pipe.link, pipe.epoch)
            if not pipe.broken:
                for side in ("target", "draft"):
                    yield ("drop", *name, side)
            for sequence, queue in pipe.down.items():
                if queue and pipe.draft_up:
                    yield ("down again", *name, sequence)
            for sequence, frames in pipe.up.items():
                if frames:
                    yield ("up again", *name, sequence)
                    if isinstance(frames[0][0], Branches):
                        yield ("overflow", *name, sequence)
            if pipe.draft_up:
                for sequence in self.draft_of(pipe)._links[pipe.number].sequences:
                    yield ("evict", *name, sequence)
        for number, draft in enumerate(self.drafts):
            yield ("crash draft", number)
            if not draft._follower.leaving:
                yield ("drain", number)
        for target in self.targets:
            if target.core.has_work:
                yield ("crash target", target.number)
                for sequence in sorted(target.texts.keys() - target.finished):
                    for arrivals in self._to_target(target.number):
                        yield ("cancel", target.number, arrivals, sequence)
                if any(e.unanswered_since == self.now for e in target.speculator.endpoints):
                    yield ("stall",)

    # How it happens

    def apply(self, action: Action) -> None:
        kind, *rest = action
        if kind in self.setting.faults:
            self.faults_left -= 1
        _APPLY[kind](self, *rest)

    def _target(self, number: int, arrivals: Arrivals, script: Sequence[Action] = ()) -> None:
        target = self.targets[number]
        self._arrive(arrivals)
        target.script = deque(script)
        self.waited = len(script)
        target.step()
        if target.script:
            raise RuntimeError("a wait ended before its script")

    def _draft(self, number: int, arrivals: Arrivals) -> None:
        draft = self.drafts[number]
        for link, epoch, sequence, count in arrivals:
            pipe = self._find(link, epoch)
            for _ in range(count):
                frames = pipe.down[sequence].pop(0)
                draft.handle(TargetFrames(pipe.number, frames))
        self._step_draft(draft)

    def _step_draft(self, draft: DraftCore) -> None:
        output = draft.step()
        pipes = {pipe.number: pipe for pipe in self.pipes}
        for each in output.links:
            pipe = pipes[each.link]
            if pipe.broken:
                continue
            for frame in each.frames:
                pipe.up.setdefault(frame.sequence, []).append((frame, output.load))

    def _arrive(self, arrivals: Arrivals) -> None:
        for link, epoch, sequence, count in arrivals:
            for _ in range(count):
                self._up(link, epoch, sequence)

    def _up(self, link: int, epoch: int, sequence: int) -> None:
        pipe = self._find(link, epoch)
        frame, load = pipe.up[sequence].pop(0)
        record = DraftFrames(link, epoch, [frame], load)
        self.target_of(pipe).core.handle_link(record)
        self._check_branches(self.target_of(pipe))
        self._tidy()

    def _up_again(self, link: int, epoch: int, sequence: int) -> None:
        pipe = self._find(link, epoch)
        pipe.up[sequence].insert(0, pipe.up[sequence][0])

    def _down_again(self, link: int, epoch: int, sequence: int) -> None:
        pipe = self._find(link, epoch)
        pipe.down[sequence].insert(0, pipe.down[sequence][0])

    def _overflow(self, link: int, epoch: int, sequence: int) -> None:
        """A slow reader: branches are dropped before they are written."""
        self._find(link, epoch).up[sequence].pop(0)
        self._tidy()

    def _drop(self, link: int, epoch: int, side: str) -> None:
        if side == "target":
            self.close_target_end(link, epoch, tell=True)
        else:
            self._close_draft_end(self._find(link, epoch))

    def _notice(self, link: int, epoch: int) -> None:
        """The other end learns that it is over."""
        pipe = self._find(link, epoch)
        if pipe.target_up:
            self.close_target_end(link, epoch, tell=True)
        else:
            self._close_draft_end(pipe)
        self._tidy()

    def close_target_end(self, link: int, epoch: int, tell: bool = False) -> None:
        pipe = self._find(link, epoch)
        pipe.target_up = False
        state = link_state.transition(self.link_states[link], link_state.DraftLinkEvent.FAIL)
        self.link_states[link] = state
        if tell:
            self.target_of(pipe).core.handle_link(DraftLinkDown(link, epoch))

    def _close_draft_end(self, pipe: Pipe) -> None:
        pipe.draft_up = False
        pipe.down.clear()
        self.draft_of(pipe).handle(LinkGone(pipe.number))

    def _connect(self, link: int) -> None:
        state = self.link_states[link]
        if state is link_state.DraftLinkState.WAITING:
            state = link_state.transition(state, link_state.DraftLinkEvent.RETRY)
        self.link_states[link] = link_state.transition(state, link_state.DraftLinkEvent.WELCOME)
        self.epochs[link] += 1
        pipe = Pipe(link, self.epochs[link])
        self.pipes.append(pipe)
        depth = self.setting.depth
        self.draft_of(pipe).handle(TargetLinkUp(pipe.number, depth))
        up = DraftLinkUp(link, pipe.epoch, False, self.setting.draft_room, 1000, depth)
        self.target_of(pipe).core.handle_link(up)

    def _crash_draft(self, number: int) -> None:
        self.drafts[number] = self._new_draft()
        for pipe in self.pipes:
            if self.setting.links[pipe.link][1] == number and pipe.draft_up:
                pipe.draft_up = False
                pipe.down.clear()
        self._tidy()

    def _crash_target(self, number: int) -> None:
        """Another one takes over: clients come back with what they have got."""
        target = self.targets[number]
        target.start()
        for pipe in self.pipes:
            if self.target_of(pipe) is target and pipe.target_up:
                self.close_target_end(pipe.link, pipe.epoch)
        for sequence in sorted(target.texts.keys() - target.finished):
            target.submit(sequence)

    def _cancel(self, number: int, arrivals: Arrivals, sequence: int) -> None:
        self._arrive(arrivals)
        self.targets[number].core.handle(Cancel(sequence))
        self.targets[number].finished.add(sequence)

    def _evict(self, link: int, epoch: int, sequence: int) -> None:
        pipe = self._find(link, epoch)
        draft = self.draft_of(pipe)
        there = draft._links[pipe.number]
        draft._room._evict(there, there.sequences[sequence])
        self._step_draft(draft)

    def _drain(self, number: int) -> None:
        self.drafts[number].handle(AnnounceLeaving())
        self._step_draft(self.drafts[number])

    def _stall(self) -> None:
        """No answer for longer than a target has patience."""
        self.now += STALL_SECONDS

    def _find(self, link: int, epoch: int) -> Pipe:
        pipe = self.pipe(link, epoch)
        if pipe is None:
            raise RuntimeError("no such pipe")
        return pipe

    def _tidy(self) -> None:
        """Forget pipes that carry nothing any more."""
        self.pipes = [
            pipe for pipe in self.pipes if pipe.target_up or pipe.draft_up or any(pipe.up.values())
        ]

    # When nothing more goes wrong

    def calm_round(self) -> None:
        """All that is under way arrives, what is broken is made again, then targets step."""
        self.settle()
        self.now += CALM_SECONDS
        for target in self.targets:
            if target.has_work:
                target.script = deque([("time is up",)] * 9)
                target.step()

    def settle(self) -> None:
        """Until nothing is left to do but to step the targets."""
        self.faults_left = 0
        for number, draft in enumerate(self.drafts):
            if draft._follower.leaving:
                self._crash_draft(number)
        while self._progress():
            pass

    def _progress(self) -> bool:
        """Everything that can happen, once; False when nothing could."""
        before = len(self.pipes), sum(p.broken for p in self.pipes)
        for pipe in list(self.pipes):
            if pipe.broken and (pipe.target_up or pipe.draft_up):
                self._notice(pipe.link, pipe.epoch)
        for link in range(len(self.setting.links)):
            if self._can_connect(link):
                self._connect(link)
        moved = before != (len(self.pipes), sum(p.broken for p in self.pipes))
        for number, draft in enumerate(self.drafts):
            *_, everything = self._to_draft(number)
            if everything or draft.has_work:
                self._draft(number, everything)
                moved = True
        for target in self.targets:
            *_, everything = self._to_target(target.number)
            self._arrive(everything)
            moved = moved or bool(everything)
        return moved

    def lengthen(self, tokens: int) -> None:
        """Requests that have not ended go on for longer."""
        for target in self.targets:
            scheduler = target.core.scheduler
            for sequence in (*scheduler._running.values(), *scheduler._waiting):
                sequence.max_committed += tokens
                sequence.completion._rules = StopRules(self.setting.max_tokens + tokens)

    def speculates(self) -> bool:
        """Every sequence that goes on has branches to look its outcome up in.

        Where the draft has not room for all of them: one that does.
        """
        fed = [
            state.session.attached and len(state.session.branches) > 0
            for target in self.targets
            for state in target.speculator._sequences.values()
        ]
        if any(target.core.scheduler.num_waiting for target in self.targets):
            return False
        if self.setting.draft_room >= len(self.setting.prompts):
            return all(fed)
        return any(fed) or not fed

    # What must be so

    def check(self) -> None:
        """Raise Wrong, or RuntimeError by one of the engines, where a promise is broken."""
        for target in self.targets:
            target.core.check_integrity()
            self._check_text(target)
            self._check_branches(target)
        for draft in self.drafts:
            draft.check_integrity()

    def _check_text(self, target: Target) -> None:
        for sequence, text in target.texts.items():
            expected = plain(self.setting.prompts[sequence][1], self.setting.max_tokens + LONGER)
            if tuple(text) != expected[: len(text)]:
                raise Wrong("committed text is not plain decoding's")

    def _check_branches(self, target: Target) -> None:
        """What a look-up can find continues the committed text, whatever the outcome is."""
        for state in target.speculator._sequences.values():
            sequence = state.sequence
            text, chain = target.base.get(sequence.id) or (tuple(sequence.committed()), ())
            for (accepted, token), tokens in state.session.branches._branches.items():
                before = (*text, *chain[:accepted], token)
                if tuple(tokens) != continued(before, len(tokens)):
                    raise Wrong("a branch was computed for another text")

    def check_quiet(self) -> None:
        """All requests have ended and nothing is in flight: nothing may be left anywhere."""
        for target in self.targets:
            missing = [seq for seq in target.texts if seq not in target.finished]
            pool = target.core.scheduler.pool
            if missing or target.core.has_work:
                raise Wrong(f"sequences {missing} did not finish")
            if target.speculator._sequences or pool.num_leases or pool.num_reserved:
                raise Wrong("the target holds something for a request that has ended")
            if any(e.unanswered_since is not None for e in target.speculator.endpoints):
                raise Wrong("the target expects an answer where nothing is asked")
        for draft in self.drafts:
            if any(link.sequences for link in draft._links.values()):
                raise Wrong("the draft holds a sequence that has ended")

    # What tells one state from another

    def key(self) -> bytes:
        """All that what happens next depends on; counters and measured times are no part of it."""
        parts = [
            self.faults_left,
            [state.value for state in self.link_states],
            [_pipe_key(pipe) for pipe in self.pipes],
            [self._target_key(target) for target in self.targets],
            [_draft_key(draft, self.now) for draft in self.drafts],
        ]
        return msgspec.msgpack.encode(parts)

    def _target_key(self, target: Target) -> list[Any]:
        core, speculator = target.core, target.speculator
        sequences = [
            [s.id, s.state.value, s.num_committed, s.num_written]
            for s in (*core.scheduler._running.values(), *core.scheduler._waiting)
        ]
        endpoints = [
            [
                e.epoch,
                e.leaving,
                self.now < e.busy_until,
                sorted(e.sequences),
                e.elsewhere if self.now < e.elsewhere_until else 0,
                e.unanswered_since is not None and self.now - e.unanswered_since,
                e.outbox,
            ]
            for e in speculator.endpoints
        ]
        texts = [[seq, len(text), seq in target.finished] for seq, text in target.texts.items()]
        rounds = [_rounds_key(s) for s in speculator._sequences.values()]
        return [texts, sequences, endpoints, rounds]


def _rounds_key(state: Any) -> list[Any]:
    rounds = state.session
    return [
        state.sequence.id,
        rounds.state.value,
        rounds.round,
        rounds.link,
        rounds.epoch,
        rounds.decided,
        rounds.branches._length,
        list(rounds.branches._branches.items()),
        state.outcome_sent,
        sorted(state.refused_by),
    ]


def _pipe_key(pipe: Pipe) -> list[Any]:
    down = [[sequence, queue] for sequence, queue in sorted(pipe.down.items()) if queue]
    up = [[sequence, queue] for sequence, queue in sorted(pipe.up.items()) if queue]
    return [pipe.link, pipe.epoch, pipe.target_up, pipe.draft_up, down, up]


def _draft_key(draft: DraftCore, now: float) -> list[Any]:
    links = [
        [
            link.id,
            list(link.inbox),
            link.outbox,
            [_sequence_key(sequence, now) for sequence in link.sequences.values()],
        ]
        for link in draft._links.values()
    ]
    return [draft._follower.leaving, links]


def _sequence_key(sequence: DraftSequence, now: float) -> list[Any]:
    branches = [[*name, o.tokens, o.num_pushed] for name, o in sequence.branches.items()]
    return [
        sequence.id,
        sequence.round,
        sequence.phase.value,
        sequence.output,
        sequence.speculation,
        sequence.decided and (sequence.decided.accepted, sequence.decided.token),
        sequence.depth,
        sequence.source,
        sequence.complete,
        sequence.was_answered,
        now - sequence.pushed_at,
        branches,
    ]


def _arrivals(queues: Iterable[tuple[int, int, int, int]]) -> Iterator[Arrivals]:
    """How many messages of each queue may have come: none first, all last."""
    waiting = [queue for queue in queues if queue[3]]
    for counts in product(*(range(length + 1) for *_, length in waiting)):
        named = zip(waiting, counts, strict=True)
        yield tuple((*queue[:3], count) for queue, count in named if count)


_APPLY: dict[str, Callable[..., None]] = {
    "target": World._target,
    "draft": World._draft,
    "up": World._up,
    "notice": World._notice,
    "connect": World._connect,
    # Faults
    "drop": World._drop,
    "down again": World._down_again,
    "up again": World._up_again,
    "overflow": World._overflow,
    "evict": World._evict,
    "crash draft": World._crash_draft,
    "crash target": World._crash_target,
    "cancel": World._cancel,
    "drain": World._drain,
    "stall": World._stall,
}
FAULTS = frozenset(list(_APPLY)[5:])
