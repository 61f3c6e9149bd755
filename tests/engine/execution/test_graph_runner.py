"""Steps that are launched: the next one is told ahead what it will be, and graphs are captured."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from ssd_engine.execution import graphs
from ssd_engine.execution.graphs import GraphRunner, InFlight, capture_graph, expected_parts
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, Draw, Part, TreeRows
from ssd_engine.forward.step_inputs import StepInputs, StepRun
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from tests.engine.execution.emulated_device import (
    BLOCKS,
    DUMMY,
    SHAPE,
    Event,
    emulate,
    small_runner,
    with_prompts,
)
from tests.harness import BLOCK

pytestmark = pytest.mark.usefixtures("quick_interpreter")


class PendingEvent(Event):
    """Of a device that ends its work when a test says so."""

    pending: ClassVar[list[Event]] = []

    def record(self, *_: object) -> None:
        self.pending.append(self)

    def query(self) -> bool:
        return self not in self.pending


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, PendingEvent)
    monkeypatch.setattr(PendingEvent, "pending", [])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return with_prompts(small_runner(tmp_path_factory.mktemp("model")))


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each call has filled."""
    calls: list[int] = []
    fill: Any = StepInputs.fill

    def counted(self: StepInputs, runs: Sequence[StepRun], *rest: object) -> Any:
        calls.append(len(runs))
        return fill(self, runs, *rest)

    monkeypatch.setattr(StepInputs, "fill", counted)
    return calls


def make_steps(runner: ModelRunner) -> GraphRunner:
    histories = Histories(2, SHAPE.rows, runner.config.head_rows, torch.device("cpu"))
    one = Step(runner.model, runner.kv, SHAPE, 1, num_sides=2, histories=histories)
    one.inputs.clear(DUMMY)
    return GraphRunner([one], eager=True)


def launch(steps: GraphRunner, parts: Sequence[Part], draws: Sequence[Draw | None]) -> InFlight:
    return steps.launch(parts, draws, DUMMY)


def ended(flight: InFlight) -> list[int]:
    """As the engine waits: asked once while it is computed, once after that."""
    assert not flight.done()
    PendingEvent.pending.clear()
    assert flight.done()
    return flight.result().drawn


def rounds(starts: Sequence[int], seed: int) -> tuple[list[Chunk], list[Draw | None]]:
    rng = random.Random(seed)
    parts = [
        Chunk([rng.randrange(512) for _ in range(2)], start, BLOCKS[i], 2)
        for i, start in enumerate(starts)
    ]
    draws: list[Draw | None] = [
        Draw(i, 0.5 * i, part.start + 1 + at)
        for i, part in enumerate(parts)
        for at in range(part.num_logits)
    ]
    return parts, draws


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("second", "num_fills"), [([42, 72], 2), ([42, 71], 3)], ids=["all right", "one rejected"]
)
def test_a_step_draws_the_same_whether_it_was_expected_or_not(
    runner: ModelRunner, filled: list[int], second: list[int], num_fills: int
) -> None:
    first, following = rounds([40, 70], 1), rounds(second, 2)
    steps = make_steps(runner)
    ended(launch(steps, *first))
    assert filled == [2, 2]  # its own, and what is expected after it
    got = ended(launch(steps, *following))
    assert len(filled) == num_fills + 1  # a last one for what would follow
    assert got == ended(launch(make_steps(runner), *following))


@pytest.mark.sampled
@pytest.mark.parametrize("accepted", [1, 0], ids=["expected", "rejected"])
def test_what_was_committed_is_known_to_the_step_after_it(
    runner: ModelRunner, filled: list[int], accepted: int
) -> None:
    """A token that a bias makes the likeliest is drawn until it was said."""
    params = SamplingParams(1, frequency_penalty=30.0, logit_bias=((6, 85.0), (8, 100.0)))
    history = History(params, [1, 2], [7, 7])

    def round_after(start: int, guess: int) -> tuple[list[Chunk], list[Draw | None]]:
        draws = [Draw.of(replace(params, temperature=0.0), 0, history, i) for i in range(2)]
        chunk = Chunk([history.output[-1], guess], start, BLOCKS[0], 2)
        return [chunk], [draw._replace(position=start + 1 + i) for i, draw in enumerate(draws)]

    steps = make_steps(runner)
    assert ended(launch(steps, *round_after(40, 8))) == [8, 6]
    history.output.extend([8, 8][: accepted + 1])
    following = round_after(41 + accepted, 7)
    got = ended(launch(steps, *following))
    assert len(filled) == (3 if accepted else 4)  # two of them for what would follow
    assert got == ended(launch(make_steps(runner), *following)) == [6, 6]


def test_a_step_is_expected_by_a_caller_who_asks_and_as_it_would_draw(
    runner: ModelRunner, filled: list[int]
) -> None:
    steps = make_steps(runner)
    launch(steps, *rounds([38], 1)).result()
    assert filled == [1]
    PendingEvent.pending.clear()
    ended(launch(steps, *rounds([40], 1)))
    assert filled == [1, 1, 1]
    parts, draws = rounds([42], 2)
    launch(steps, parts, [Draw(9, 1.0, draw.position) for draw in draws if draw]).result()
    assert filled == [1, 1, 1, 1]


def test_nothing_follows_where_a_sequence_has_no_room_or_others_run() -> None:
    parts, _ = rounds([40, 70], 1)
    last = replace(parts[1], start=len(BLOCKS[1]) * BLOCK - 3)
    assert expected_parts([parts[0], last], BLOCK) == []
    assert expected_parts([parts[0], replace(parts[1], num_logits=0)], BLOCK) == []
    tree = TreeRows([1], [9], [8], [100], 9, BLOCKS[0], [100])
    assert expected_parts([parts[0], tree], BLOCK) == []


# Captures, and gaps between steps


NO_MEMORY = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError...'")
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access")
OF_WHAT_RAN = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")


@pytest.mark.parametrize(
    ("ends", "runs", "raised", "happens"),
    [
        ([None], None, None, ["begin"]),
        ([NO_MEMORY, None], None, None, ["begin", "empty", "begin"]),
        (
            [NO_MEMORY, NO_MEMORY],
            None,
            (torch.OutOfMemoryError, "out of memory"),
            ["begin", "empty", "begin"],
        ),
        ([ILLEGAL], None, (torch.AcceleratorError, "illegal"), ["begin"]),
        # What ran says what went wrong, and not the end of its capture.
        (
            [torch.AcceleratorError("CUDA error: capture is invalid"), None],
            OF_WHAT_RAN,
            (torch.OutOfMemoryError, "Tried to allocate 2 MiB"),
            ["begin", "empty", "begin"],
        ),
    ],
    ids=["at once", "at second try", "never", "another error", "what ran"],
)
def test_a_capture_that_runs_out_of_memory_is_tried_again_once_after_the_cache_is_given_back(
    ends: list[Exception | None],
    runs: Exception | None,
    raised: tuple[type[Exception], str] | None,
    happens: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ends``: of one capture after the other. ``runs``: what is captured raises that."""
    happened, left = list[str](), iter(ends)

    class FakeGraph:
        def capture_begin(self, memory: Any, capture_error_mode: str) -> None:
            happened.append("begin")

        def capture_end(self) -> None:
            if (error := next(left)) is not None:
                raise error

        def pool(self) -> str:
            return "memory"

    def run() -> None:
        if runs is not None:
            raise runs

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(graphs, "_capture_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty"))
    if raised is None:
        assert capture_graph(run, None)[1] == "memory"
    else:
        with pytest.raises(raised[0], match=raised[1]):
            capture_graph(run, None)
    assert happened == happens


class Moment(float):
    """An event on a device, at so many milliseconds."""

    def elapsed_time(self, later: "Moment") -> float:
        return later - self


def test_a_gap_is_that_between_steps_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not counting the time in which no step was asked for."""
    emulate(monkeypatch)
    runner: Any = GraphRunner([], eager=True)
    found = []
    for begin, end, follows in [(10, 14, False), (15, 20, True), (60_000, 60_004, False)]:
        assert runner.ended(Moment(begin), Moment(end), follows) == (end - begin) / 1000
        found.append(runner.gap_seconds)
    assert found == [0.0, 0.001, 0.0]  # the prefill of another request was before the last one
    runner._follows_step = True
    runner.interrupted()
    assert not runner._follows_step
