"""While a step is computed, the next one is told what it will be if all of this one is right."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from ssd_engine.execution import graphs, step
from ssd_engine.execution.graphs import GraphRunner, InFlight, expected_draws, expected_parts
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, Draw, Part, TreeRows
from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from tests.harness import BLOCK, make_runner
from tests.random_models import make_model
from tests.suite.scale import full_only

pytestmark = pytest.mark.usefixtures("quick_interpreter")

SHAPE = StepShape(rows=4, runs=2, rows_per_run=2, max_positions=160, block_size=BLOCK)
DUMMY = 511 * BLOCK
BLOCKS = [list(range(10)), list(range(10, 20))]


class Event:
    """Of a device that ends its work when a test says so."""

    pending: ClassVar[list["Event"]] = []

    def __init__(self, **_: object) -> None: ...

    def record(self, *_: object) -> None:
        Event.pending.append(self)

    def query(self) -> bool:
        return self not in Event.pending

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("model")
    make_model("llama3-untied", directory)
    runner = make_runner(directory, device="cpu", kernels="torch")
    del runner.model.weights.layers[2:], runner.kv.layers[2:]
    return runner


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("a device has events of its own")
    monkeypatch.setattr(step, "LEADING_LAYERS", 1)
    monkeypatch.setattr(graphs.torch.cuda, "Event", Event)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda: None)
    yield
    Event.pending.clear()


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each call has filled."""
    calls: list[int] = []
    fill = StepInputs.fill

    def counted(self: StepInputs, runs: Sequence, *rest: object) -> list[int]:  # type: ignore[type-arg]
        calls.append(len(runs))
        return fill(self, runs, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(StepInputs, "fill", counted)
    return calls


def make_steps(runner: ModelRunner) -> GraphRunner:
    histories = Histories(2, SHAPE.rows, runner.config.head_rows, torch.device("cpu"))
    one = Step(runner.model, runner.kv, SHAPE, 1, num_sides=2, histories=histories)
    one.inputs.clear(DUMMY)
    return GraphRunner([one], eager=True)


def launch(steps: GraphRunner, parts: Sequence[Part], draws: Sequence[Draw | None]) -> InFlight:
    flight = steps.launch(parts, draws, DUMMY)
    assert flight is not None
    return flight


def ended(flight: InFlight) -> list[int]:
    """As the engine waits: asked once while it is computed, once after that."""
    assert not flight.done()
    Event.pending.clear()
    assert flight.done()
    drawn = flight.result().drawn
    assert drawn is not None
    return drawn


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


@pytest.mark.parametrize(
    ("second", "num_fills"),
    [([42, 72], 2), full_only([42, 71], 3)],
    ids=["all right", "one rejected"],
)
def test_a_step_draws_the_same_whether_it_was_expected_or_not(
    runner: ModelRunner, filled: list[int], second: list[int], num_fills: int
) -> None:
    for blocks in BLOCKS:
        runner.forward([Chunk([7 * i % 512 for i in range(120)], 0, blocks, 0)])
    first, following = rounds([40, 70], 1), rounds(second, 2)
    steps = make_steps(runner)
    ended(launch(steps, *first))
    assert filled == [2, 2]  # its own, and what is expected after it
    got = ended(launch(steps, *following))
    assert len(filled) == num_fills + 1  # a last one for what would follow
    assert got == ended(launch(make_steps(runner), *following))


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


def test_a_caller_who_does_not_ask_gets_no_step_prepared(
    runner: ModelRunner, filled: list[int]
) -> None:
    steps = make_steps(runner)
    for start in (40, 42):
        parts, draws = rounds([start], start)
        launch(steps, parts, draws).result()
    assert filled == [1, 1]


def test_other_draws_are_no_expected_step(runner: ModelRunner, filled: list[int]) -> None:
    steps = make_steps(runner)
    ended(launch(steps, *rounds([40], 1)))
    parts, draws = rounds([42], 2)
    launch(steps, parts, [Draw(9, 1.0, draw.position) for draw in draws if draw]).result()
    assert filled == [1, 1, 1]


def test_what_follows_is_as_long_and_behind() -> None:
    parts, draws = rounds([40, 70], 1)
    following = expected_parts(parts, BLOCK)
    assert [(part.start, len(part.tokens)) for part in following] == [(42, 2), (72, 2)]
    later = expected_draws(parts, [*draws[:3], None])
    assert [draw and draw.position for draw in later] == [43, 44, 73, None]


def test_nothing_follows_where_a_sequence_has_no_room_or_others_run() -> None:
    parts, _ = rounds([40, 70], 1)
    last = replace(parts[1], start=len(BLOCKS[1]) * BLOCK - 3)
    assert expected_parts([parts[0], last], BLOCK) == []
    assert expected_parts([parts[0], replace(parts[1], num_logits=0)], BLOCK) == []
    tree = TreeRows([1], [9], [8], [100], 9, BLOCKS[0], [100])
    assert expected_parts([parts[0], tree], BLOCK) == []
