"""The graph runner: steps of few rows, each shape captured once and replayed.

Between two replays the host fills a block of pinned memory and launches; what comes back is one
small copy, whose arrival an event tells. A target's step begins with a short graph, which is
launched in no time; the launch of the long one is over before the short one has been computed.
While a step is computed, the block of the next one is filled for the case that all of this one is
right. A draft's step is one graph: while it is launched, the device computes the one before it.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.execution.step import Step
from ssd_engine.execution.step_features import StepFeatures
from ssd_engine.forward.batch import (
    Chunk,
    Draw,
    Drawing,
    KVCopy,
    Part,
    TreeRows,
    drawing_of,
    logit_rows,
    slots_of,
)
from ssd_engine.forward.result import (
    ForwardResult,
    PendingForward,
    RejectionVerdict,
)
from ssd_engine.forward.step_inputs import StepRun, StepShape
from ssd_engine.grammar.masks import HeldRow
from ssd_engine.kernels.sampling.rejecting import Rejector
from ssd_engine.process.progress import tracked
from ssd_engine.sampling.guesses import NO_GUESS
from ssd_engine.sampling.rejection import SampledSpeculation
from ssd_engine.sampling.reported import ReportedLogprobs

log = logging.getLogger(__name__)

STARTS = 4  # events of a step: more than there are steps whose times are not read yet


@dataclass(frozen=True, slots=True)
class _Notices:
    """What is called while a step is launched."""

    launched: Callable[[], None]  # the device has begun
    # What drawing reads has to be there when this is over; None: it reads nothing of that kind.
    before_drawing: Callable[[], None] | None = None


class _Captured(Protocol):
    """The captured graphs of one side of a step."""

    @property
    def num_turns(self) -> int: ...

    @property
    def logits(self) -> Tensor | None:
        """Where they are after a replay, on the first rank."""

    def replay(self, turn: int, drawing: Drawing, notices: "_Notices") -> torch.cuda.Event:
        """The event in front of it."""


@dataclass(frozen=True, slots=True)
class _InParts:
    """A target's step: its beginning is captured several times, each with an event in front."""

    beginnings: list[tuple[torch.cuda.Event, torch.cuda.CUDAGraph]]
    rest: torch.cuda.CUDAGraph
    # How tokens are drawn from the logits, which only the first rank has.
    ends: dict[Drawing, torch.cuda.CUDAGraph]
    logits: Tensor | None

    @property
    def num_turns(self) -> int:
        return len(self.beginnings)

    def replay(self, turn: int, drawing: Drawing, notices: _Notices) -> torch.cuda.Event:
        start, beginning = self.beginnings[turn]
        beginning.replay()
        notices.launched()
        self.rest.replay()
        if notices.before_drawing is not None:
            notices.before_drawing()  # while the device is busy
        if self.ends:
            self.ends[drawing].replay()
        return start


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """A draft's step, as one graph: while it is launched, the device computes the one before it.
    Where grammars decide about its tokens, it is launched in two parts."""

    starts: list[torch.cuda.Event]
    stream: torch.cuda.Stream
    graphs: dict[Drawing, torch.cuda.CUDAGraph]
    computing: torch.cuda.CUDAGraph
    held: torch.cuda.CUDAGraph  # what is drawn then
    logits: Tensor | None

    @property
    def num_turns(self) -> int:
        return len(self.starts)

    def replay(self, turn: int, drawing: Drawing, notices: _Notices) -> torch.cuda.Event:
        self.starts[turn].record(self.stream)
        if notices.before_drawing is None:
            self.graphs[drawing].replay()
            notices.launched()
        else:
            self.computing.replay()
            notices.launched()
            notices.before_drawing()
            self.held.replay()
        return self.starts[turn]


@dataclass(frozen=True, slots=True)
class _Expected:
    """A step that follows if all that is in flight is right. Its inputs lack only its tokens."""

    step: Step
    side: int
    parts: list[Chunk]
    draws: list[Draw | None]
    drawing: Drawing

    def is_this(
        self, step: Step, side: int, parts: Sequence[Part], draws: Sequence[Draw | None]
    ) -> bool:
        return (
            step is self.step
            and side == self.side
            and len(parts) == len(self.parts)
            and all(map(_same_place, parts, self.parts))
            and list(draws) == self.draws
        )


@dataclass(frozen=True, slots=True)
class _Telling:
    """The graphs of steps that tell features: those that are captured so far, and all others."""

    features: StepFeatures
    captured: dict[tuple[StepShape, int], _Captured]
    left: Generator[None]


class GraphRunner:
    def __init__(
        self, steps: Sequence[Step], eager: bool, rejector: Rejector | None = None
    ) -> None:
        """``steps`` in the order in which they are tried: the first that fits is taken.
        ``rejector``: for a target whose device verifies by rejection."""
        self.steps, self._rejector = steps, rejector
        self.eager = eager
        self._captured: dict[tuple[StepShape, int], _Captured] = {}
        self._plain: dict[tuple[StepShape, int], _Captured] = {}  # those that tell no features
        self._memory: Any = None  # that graphs share
        self._features: StepFeatures | None = None  # what steps tell from now on
        self._telling: _Telling | None = None  # the last that were asked for: links come and go
        self._starts = [torch.cuda.Event(enable_timing=True) for _ in range(STARTS)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(STARTS)]
        self._launches = 0
        self._stream = torch.cuda.current_stream()
        self._using: dict[tuple[StepShape, int], torch.cuda.Event] = {}  # the end of what uses it
        self._reading_masks: dict[int, torch.cuda.Event] = {}  # likewise, by sides
        self._reading_features: dict[int, torch.cuda.Event] = {}  # likewise
        self._beside: torch.cuda.Stream | None = None
        self._expected: _Expected | None = None
        self._last: InFlight | None = None
        self._last_end: torch.cuda.Event | None = None
        # The device's idle time between the last step whose result was read and the one before it;
        # 0 where another forward was launched in between.
        self.gap_seconds = 0.0
        self._follows_step = False

    @property
    def chains(self) -> bool:
        """Whether a step may take its tokens from the step before it, which is in flight."""
        return all(step.follows for step in self.steps)

    def capture(self, dummy_slot: int) -> None:
        for step in tracked("preparing steps", self.steps, len(self.steps), "step shapes"):
            step.inputs.clear(dummy_slot)
            for drawing in step.drawings:
                step.run(drawing)  # what is compiled on first use is compiled now
                if self._rejector is not None and step.logits is not None:
                    self._rejector.warm_up(step.scores(step.logits, drawing))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as much memory as there is
        for _ in self._capture_each(None, self._plain):
            pass
        self._captured = self._plain
        log.info("%d step shapes %s", len(self.steps), "ready" if self.eager else "captured")

    def prepare(self, features: StepFeatures) -> bool:
        """Capture one more of the graphs by which steps tell ``features``, while steps go on by
        those that they have. True: all are there, and ``watch`` captures none."""
        if self._telling is None or self._telling.features is not features:
            self._telling = None  # its memory goes first
            captured: dict[tuple[StepShape, int], _Captured] = {}
            self._telling = _Telling(features, captured, self._capture_each(features, captured))
        telling, self._telling = self._telling, None  # nothing is left of what fails
        done = next(telling.left, True) is True
        self._telling = telling
        return done

    def watch(self, features: StepFeatures | None) -> None:
        """From the next launch on, steps tell ``features`` what they ask for, by graphs of their
        own; None: by those that copy nothing. Steps that are in flight end as they are."""
        while features is not None and not self.prepare(features):
            pass
        torch.cuda.synchronize()
        self._features, self._expected = features, None
        for step in self.steps:
            step.watch(features)
        telling = self._telling if features is not None else None
        self._captured = self._plain if telling is None else telling.captured

    def _capture_each(
        self, features: StepFeatures | None, captured: dict[tuple[StepShape, int], _Captured]
    ) -> Generator[None]:
        """Captures graph after graph of all steps, as they are when they tell ``features``; none
        where steps are launched eagerly. Between two of them steps are launched as before. All
        ranks capture the same one at the same time: their sums are part of it."""
        steps = () if self.eager else self.steps
        for step in tracked("capturing graphs", steps, len(steps), "step shapes"):
            for side in range(step.num_sides):
                capture = partial(self._capture_one, step, side, features)
                capture_side = self._capture_at_once if step.ranks > 1 else self._capture_parts
                captured[step.shape, side] = yield from capture_side(step, side, capture)

    def _capture_one(
        self, step: Step, side: int, features: StepFeatures | None, run: Callable[[], None]
    ) -> Generator[None, None, torch.cuda.CUDAGraph]:
        step.use(side)
        step.watch(features)
        try:
            graph, self._memory = capture_graph(run, self._memory)
        finally:
            step.watch(self._features)
        yield
        return graph

    def _capture_parts(
        self, step: Step, side: int, capture: "_Capture"
    ) -> Generator[None, None, _InParts]:
        beginnings = []
        for _ in range(side, STARTS, step.num_sides):  # sides take turns
            start = torch.cuda.Event(enable_timing=True, external=True)
            beginnings.append((start, (yield from capture(partial(_after, start, step.begin)))))
        rest = yield from capture(step.score)
        logits, ends = step.logits, {}
        for drawing in step.drawings:
            if logits is None:
                yield  # while the first rank captures it
            else:
                ends[drawing] = yield from capture(partial(step.finish, drawing))
        return _InParts(beginnings, rest, ends, logits)

    def _capture_at_once(
        self, step: Step, side: int, capture: "_Capture"
    ) -> Generator[None, None, _AtOnce]:
        turns = range(side, STARTS, step.num_sides)
        starts = [torch.cuda.Event(enable_timing=True) for _ in turns]
        graphs = {}
        for drawing in step.drawings:
            graphs[drawing] = yield from capture(partial(step.run, drawing))
        computing = yield from capture(step.compute)
        held = yield from capture(partial(step.finish, Drawing.ADJUSTED))
        return _AtOnce(starts, self._stream, graphs, computing, held, step.logits)

    def num_replays(self, step: Step, side: int) -> int:
        """How often a step was captured on this side."""
        captured = self._captured.get((step.shape, side))
        return 1 if captured is None else captured.num_turns

    def replay(
        self, step: Step, side: int, turn: int = 0, drawing: Drawing = Drawing.PLAIN
    ) -> None:
        """Run what was captured of a step on this side; the step itself where nothing was."""
        captured = self._captured.get((step.shape, side))
        if captured is None:
            step.run(drawing)
        else:
            captured.replay(turn, drawing, _Notices(_nothing))

    def launch(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        dummy_slot: int,
        launched: Callable[[], None] | None = None,
    ) -> "InFlight | None":
        """None when there is no step as large as this. ``launched`` is called when the device has
        begun, which may be before it has all of the step."""
        step = self.step_for(parts)
        if step is None:
            return None
        side = self._launches % step.num_sides
        expected, self._expected = self._expected, None
        if expected is not None and expected.is_this(step, side, parts, draws):
            drawing = expected.drawing
            step.use(side)
            step.inputs.put_tokens([token for part in parts for token in part.tokens])
        else:
            runs, moves = step_runs(parts, draws, step.shape.block_size)
            if (before := self._using.get((step.shape, side))) is not None:
                before.synchronize()
            step.use(side)
            step.inputs.fill(runs, dummy_slot, moves)
            drawing = step.least(drawing_of(draws))
        rows = logit_rows(parts)
        if drawing >= Drawing.ADJUSTED:
            step.tell_histories(rows, draws)
        told = _Told(parts, rows, drawing, partial(self._expect, parts, draws, dummy_slot))
        if any(draw is not None and draw.is_held for draw in draws):
            following = None
            if self._last is not None and step.ranks > 1:
                following = self._last.following
            told = replace(told, held=_Held(partial(step.held_rows, rows, draws, following)))
        return self._fly(step, side, told, launched or _nothing)

    def _write_masks(self, step: Step, side: int, held: "_Held") -> None:
        """Steps of all shapes have the same ones, for each side."""
        if (before := self._reading_masks.get(side)) is not None:
            before.synchronize()
        held.rows = held.find()
        step.write_masks(held.rows)

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> "InFlight | None":
        """See ModelRunner."""
        if flight is not self._last or not isinstance(flight, InFlight):
            return None
        step, told = flight.step, flight.told
        if step.num_sides == 1 or not all(map(_goes_deeper, told.parts)):
            return None
        side = self._launches % step.num_sides
        if (before := self._using.get((step.shape, side))) is not None:
            before.synchronize()
        step.use(side)
        if not step.deepen(flight.side, told.drawing, slots, widths):
            return None
        if told.held is not None:
            told = replace(told, held=_Held(partial(_deeper, flight, told.held)))
        return self._fly(step, side, told, _nothing)

    def _fly(
        self, step: Step, side: int, told: "_Told", launched: Callable[[], None]
    ) -> "InFlight":
        """Launch a step whose inputs are filled."""
        turn, drawing, held = self._launches % STARTS, told.drawing, told.held
        write = None if held is None else partial(self._write_masks, step, side, held)
        self._launches += 1
        self._expected = None
        end = self._ends[turn]
        reading = self._reading_features.pop(side, None)
        if reading is not None and not reading.query():  # a wait that is over costs time, too
            self._stream.wait_event(reading)
        if self.eager:
            start = self._starts[turn]
            if write is not None:
                write()
            start.record(self._stream)
            with torch.inference_mode():
                step.run(drawing)
            launched()
            logits = step.logits
        else:
            captured = self._captured[step.shape, side]
            start = captured.replay(turn // step.num_sides, drawing, _Notices(launched, write))
            logits = captured.logits
        end.record(self._stream)
        self._using[step.shape, side] = end
        if held is not None:
            self._reading_masks[side] = end
        about = (told, start, end, logits, self._features, self._rejector, self._follows_step)
        self._last, self._follows_step = InFlight(self, step, side, *about), True
        return self._last

    def interrupted(self) -> None:
        """Another forward is launched: for how long nobody asks for a step is not ours to say."""
        self._follows_step = False

    def beside(self) -> AbstractContextManager[object]:
        """What is done inside does not wait for the step that was launched last."""
        if self._beside is None:
            self._beside = torch.cuda.Stream()
        return torch.cuda.stream(self._beside)

    def features_of(self, flight: "InFlight", count: int) -> Tensor | None:
        """The features of its first rows; None where others are asked for meanwhile, or none."""
        features = flight.features
        if features is None or features is not self._features:
            return None
        stream = torch.cuda.current_stream()
        stream.wait_event(flight.end)
        rows = features.rows(flight.side, count)
        reading = torch.cuda.Event()
        reading.record(stream)
        self._reading_features[flight.side] = reading
        return rows

    def _expect(self, parts: Sequence[Part], draws: Sequence[Draw | None], dummy_slot: int) -> None:
        """``parts`` are in flight. Where the round after them has been launched, too, the side is
        still theirs, and nothing is prepared."""
        following = expected_parts(parts, self.steps[0].shape.block_size)
        step = self.step_for(following) if following else None
        if step is None or step.num_sides == 1 or step.ranks > 1:
            return
        if len(draws) != sum(part.num_logits for part in following):
            return
        side = self._launches % step.num_sides
        if (before := self._using.get((step.shape, side))) is not None and not before.query():
            return
        later = expected_draws(parts, draws)
        runs, moves = step_runs(following, later, step.shape.block_size)
        step.use(side)
        step.inputs.fill(runs, dummy_slot, moves)
        self._expected = _Expected(step, side, following, later, drawing_of(later))

    def step_for(self, parts: Sequence[Part]) -> Step | None:
        """The smallest one that has room for them."""
        rows = [len(part.tokens) for part in parts if not isinstance(part, KVCopy)]
        moves = sum(len(part.sources) for part in parts if isinstance(part, KVCopy))
        scratch = max((len(p.scratch) for p in parts if isinstance(p, TreeRows)), default=0)
        for step in self.steps:
            shape = step.shape
            if (
                sum(rows) <= shape.rows
                and len(rows) <= shape.runs
                and max(rows, default=0) <= shape.rows_per_run
                and scratch <= shape.scratch
                and moves <= shape.moves
            ):
                return step
        return None

    def ended(self, start: torch.cuda.Event, end: torch.cuda.Event, follows_step: bool) -> float:
        """Seconds that the step took; also keeps how long the device had nothing to do before."""
        self.gap_seconds = 0.0
        if follows_step and self._last_end is not None:
            self.gap_seconds = self._last_end.elapsed_time(start) / 1000
        self._last_end = end
        return start.elapsed_time(end) / 1000


@dataclass(frozen=True, slots=True)
class _Told:
    """What a step was launched with."""

    parts: Sequence[Part]
    rows: Sequence[int]  # rows of the step that ask for logits
    drawing: Drawing
    look_ahead: Callable[[], None]  # for a caller who asks whether it is done while it is not
    held: "_Held | None" = None


@dataclass(slots=True)
class _Held:
    """The rows of a step that follow grammars: known when what the step follows is."""

    find: Callable[[], list[HeldRow]]
    rows: list[HeldRow] = field(default_factory=list)  # once they are found


def _deeper(flight: "InFlight", held: _Held) -> list[HeldRow]:
    """The same rows, each after the token that it has drawn."""
    tokens = flight.following()
    return [row._replace(tail=[*row.tail, int(tokens[row.row])]) for row in held.rows]


class InFlight:
    def __init__(
        self,
        runner: GraphRunner,
        step: Step,
        side: int,
        told: _Told,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        logits: Tensor | None = None,
        features: StepFeatures | None = None,
        rejector: Rejector | None = None,
        follows_step: bool = False,
    ) -> None:
        """``logits``: where they are at its end. ``features``: what it tells. ``follows_step``: no
        other forward came in between."""
        self.step, self.side, self.told = step, side, told
        self.rows, self.end, self.features = told.rows, end, features
        self._runner, self._rejector = runner, rejector
        self._start, self._step_logits, self._follows_step = start, logits, follows_step
        self._look_ahead: Callable[[], None] | None = told.look_ahead
        self._done = False

    def done(self) -> bool:
        self._done = self._done or self.end.query()
        if not self._done and self._look_ahead is not None:
            self._look_ahead()
            self._look_ahead = None
        return self._done

    def result(self) -> ForwardResult:
        if not self._done:
            self.end.synchronize()
        rows = self.rows
        if self.step.ranks > 1:
            return self._guessed(rows)
        tokens, broken = self._verdicts(self.step.drawn_on(self.side))
        reported = None
        if self.told.drawing >= Drawing.REPORTED:
            reported = ReportedLogprobs(self.step.reported_on(self.side)[rows])
        return ForwardResult(
            lambda: self._logits(rows),
            drawn=tokens,
            broken=broken,
            reported=reported,
            reject=None if self._rejector is None else partial(self._reject, self._rejector),
            clock=self._seconds,
            make_features=self._features,
        )

    def following(self) -> NDArray[np.int32]:
        """What a draft's rows have drawn, all of the step's."""
        self.end.synchronize()
        return self.step.guesses_on(self.side)[:, self.step.ranks]

    def _guessed(self, rows: Sequence[int]) -> ForwardResult:
        ranks, lines = self.step.ranks, self.step.guesses_on(self.side)[rows]
        return ForwardResult(
            lambda: self._logits(rows),
            best=lines[:, :ranks],
            following=np.where(lines[:, 0] < 0, np.int32(NO_GUESS), lines[:, ranks]),
            sigma=self.step.sigma_of(lines),
            clock=self._seconds,
        )

    def _reject(
        self, rejector: Rejector, rounds: Sequence[tuple[int, SampledSpeculation]]
    ) -> list[RejectionVerdict]:
        """The outcomes of rounds whose first rows are these, of the rows that ask for logits."""
        if self._step_logits is None:
            raise RuntimeError("a step without logits verifies nothing")
        scores = self.step.scores(self._step_logits, self.told.drawing)
        return rejector.judge(scores, [(self.rows[first], about) for first, about in rounds])

    def _features(self) -> Tensor | None:
        return self._runner.features_of(self, sum(len(part.tokens) for part in self.told.parts))

    def _seconds(self) -> float:
        return self._runner.ended(self._start, self.end, self._follows_step)

    def _verdicts(self, drawn: NDArray[np.int32]) -> tuple[list[int], list[int]]:
        """Tokens, and where the logits were no logits. Lists: so few numbers are quicker so."""
        width, flat = self.step.run_width, drawn.tolist()
        tokens: list[int] = []
        broken: list[int] = []
        at = 1  # how many tokens are right stands before them
        for part in self.told.parts:
            if isinstance(part, KVCopy):
                continue
            count = len(part.tokens)
            first = count - part.num_logits
            tokens += flat[at + first : at + count]
            broken += flat[at + width + first : at + width + count]
            at += 1 + 2 * width
        return tokens, broken

    def _logits(self, rows: Sequence[int]) -> Tensor | None:
        logits = self._step_logits
        if logits is None or not rows:
            return None
        chosen = logits[torch.tensor(list(rows), device=logits.device), : self.step.head_rows]
        return chosen.clone()


def _goes_deeper(part: Part) -> bool:
    """Whether every row of it may go on from its own token."""
    return isinstance(part, TreeRows) or (isinstance(part, Chunk) and len(part.tokens) == 1)


def _nothing() -> None:
    """For a step of which nobody has to hear."""


# Captures what is run, on one side of a step.
_Capture = Callable[[Callable[[], None]], Generator[None, None, torch.cuda.CUDAGraph]]


def capture_graph(run: Callable[[], None], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph, and the memory that it shares with others. Unlike ``torch.cuda.graph`` it neither
    waits for the device nor gives memory back to it, as long as there is enough.

    Each rank tries again by itself: what is captured is exchanged when it is replayed."""
    try:
        return _capture(run, memory)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()  # here nothing holds what was captured until then
    return _capture(run, memory)


def _capture(run: Callable[[], None], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with _out_of_memory_told(), torch.cuda.stream(_capture_stream()):
        # Threads of planes go on meanwhile: only what this one does is part of the graph.
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # what went wrong is said by what ran
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, graph.pool()


@contextmanager
def _out_of_memory_told() -> Iterator[None]:
    """A device without memory for a graph is OutOfMemoryError, as where torch allocates."""
    try:
        yield
    except torch.AcceleratorError as error:
        if "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _after(event: torch.cuda.Event, run: Callable[[], None]) -> None:
    event.record()
    run()


def expected_parts(parts: Sequence[Part], block_size: int) -> list[Chunk]:
    """Rounds that follow rounds of which all is right, as long as these; empty where something else
    is among them, or a sequence has no room for it."""
    following = []
    for part in parts:
        if not isinstance(part, Chunk) or part.num_logits != len(part.tokens):
            return []
        if part.end + len(part.tokens) > len(part.blocks) * block_size:
            return []
        following.append(Chunk(part.tokens, part.end, part.blocks, part.num_logits))
    return following


def expected_draws(parts: Sequence[Part], draws: Sequence[Draw | None]) -> list[Draw | None]:
    """The draws of the rounds that follow."""
    widths = [part.num_logits for part in parts for _ in range(part.num_logits)]
    return [
        None if draw is None else draw._replace(position=draw.position + width)
        for draw, width in zip(draws, widths, strict=True)
    ]


def _same_place(part: Part, expected: Chunk) -> bool:
    return (
        isinstance(part, Chunk)
        and part.blocks is expected.blocks
        and part.start == expected.start
        and part.num_logits == expected.num_logits
        and len(part.tokens) == len(expected.tokens)
    )


def step_runs(
    parts: Sequence[Part], draws: Sequence[Draw | None], block_size: int
) -> tuple[list[StepRun], list[tuple[int, int]]]:
    """Rows of the parts, and slots whose KV is moved first. ``draws``: of rows with logits."""
    runs: list[StepRun] = []
    moves: list[tuple[int, int]] = []
    chunks: list[tuple[int, Chunk]] = []  # with the numbers of their runs
    at = 0
    for part in parts:
        if isinstance(part, KVCopy):
            moves += zip(part.sources, slots_of(part, block_size), strict=True)
            continue
        silent = len(part.tokens) - part.num_logits
        drawn = (*(None,) * silent, *draws[at : at + part.num_logits])
        at += part.num_logits
        if isinstance(part, TreeRows):
            runs.append(
                StepRun(
                    part.tokens,
                    part.positions,
                    part.slots,
                    part.limits,
                    part.blocks,
                    part.scratch,
                    *_newest(part, len(runs), chunks),
                    drawn,
                )
            )
        else:
            own, places = len(runs), part.positions
            chunks.append((own, part))
            slots = slots_of(part, block_size)
            runs.append(
                StepRun(part.tokens, places, slots, places, part.blocks, (), part.start, own, drawn)
            )
    return runs, moves


def _newest(tree: TreeRows, own: int, chunks: Sequence[tuple[int, Chunk]]) -> tuple[int, int]:
    """Where the tokens of the tree's sequence begin that this step computes, and in which run: two
    sequences may share blocks, but never all of them."""
    for run, chunk in chunks:
        if chunk.blocks == tree.blocks:
            return chunk.start, run
    return max(tree.limits) + 1, own
