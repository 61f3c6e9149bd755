"""Steps tell the residual stream of their rows where it is watched: interpreted kernels."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ssd_engine.errors import ConfigError
from ssd_engine.execution import graphs, step, step_features
from ssd_engine.execution.graphs import GraphRunner, InFlight
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.execution.step_features import StepFeatures
from ssd_engine.forward.batch import Chunk
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_target.engine.feature_watch import FeatureWatch
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from tests.harness import BLOCK, make_runner
from tests.random_models import make_model
from tests.suite.scale import full_only
from tests.thread_ranks import ThreadRanks

pytestmark = pytest.mark.usefixtures("quick_interpreter")

SHAPE = StepShape(rows=8, runs=2, rows_per_run=4, max_positions=160, block_size=BLOCK)
DUMMY = 511 * BLOCK
BLOCKS = [list(range(10)), list(range(10, 20))]
# Of two layers, the first of which is in the first piece of a captured step.
BOUNDARIES = (2, 0, 1)


class Event:
    """Of a device that computes at once."""

    def __init__(self, **_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Stream:
    def wait_event(self, _: Event) -> None: ...


class Graph:
    """Launches again what was launched while it was captured, as it was then."""

    captured: ClassVar[list["Graph"]] = []

    def __init__(self, one: Step, run: Callable[[], None]) -> None:
        self._step, self._run = one, run
        self._side, self._features = one._side, one._features
        Graph.captured.append(self)

    def replay(self) -> None:
        now = self._step._side, self._step._features
        self._step.use(self._side)
        self._step.watch(self._features)
        with torch.inference_mode():
            self._run()
        self._step.use(now[0])
        self._step.watch(now[1])


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("a device has events of its own")
    monkeypatch.setattr(step, "LEADING_LAYERS", 1)
    monkeypatch.setattr(step_features, "PIECE", 64)
    monkeypatch.setattr(graphs.torch.cuda, "Event", Event)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(graphs.torch.cuda, "synchronize", lambda: None)
    yield
    Graph.captured.clear()


def load(family: str, factory: pytest.TempPathFactory) -> ModelRunner:
    directory = factory.mktemp(family)
    make_model(family, directory)
    runner = make_runner(directory, kernels="torch")
    del runner.model.weights.layers[2:], runner.kv.layers[2:]
    for blocks in BLOCKS:
        runner.forward([Chunk([7 * i % 512 for i in range(120)], 0, blocks, 0)])
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load("llama3-untied", tmp_path_factory)


@pytest.fixture(scope="module", params=["llama3-untied", "olmo2", full_only("qwen3")])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(request.param, tmp_path_factory)


def make_steps(
    runner: ModelRunner, eager: bool = True, monkeypatch: pytest.MonkeyPatch | None = None
) -> GraphRunner:
    """Of one shape. ``monkeypatch``: graphs are emulated."""
    one = Step(runner.model, runner.kv, SHAPE, 1, num_sides=2)
    one.inputs.clear(DUMMY)
    if monkeypatch is not None:
        monkeypatch.setattr(graphs, "capture_graph", lambda run, memory: (Graph(one, run), memory))
    return GraphRunner([one], eager=eager)


def make_features(runner: ModelRunner, boundaries: Sequence[int] = BOUNDARIES) -> StepFeatures:
    return StepFeatures(runner.model, boundaries, SHAPE.padded_rows, 2, overlap=False)


def rounds(seed: int) -> list[Chunk]:
    """Two sequences, whose rows leave room for some that pad."""
    rng = random.Random(seed)
    return [
        Chunk([rng.randrange(512) for _ in range(width)], 120 - 5 * i, BLOCKS[i], width)
        for i, width in enumerate((4, 2))
    ]


def launch(steps: GraphRunner, parts: Sequence[Chunk]) -> InFlight:
    rows = sum(part.num_logits for part in parts)
    flight = steps.launch(parts, [None] * rows, DUMMY)
    assert flight is not None
    return flight


def expected(
    runner: ModelRunner, parts: Sequence[Chunk], boundaries: Sequence[int] = BOUNDARIES
) -> Tensor:
    """What the plain forward tells."""
    layers = runner.prompt_layers(parts)
    with torch.inference_mode():
        return layers.forward_with_features(boundaries)[1]


def assert_close(got: Tensor | None, wanted: Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


def test_a_forward_tells_what_layers_add_up_to(runner: ModelRunner) -> None:
    """Told layer by layer, by hand."""
    layers = runner.prompt_layers(rounds(1))
    with torch.inference_mode():
        layers.embed()
        found = [layers.hidden.clone()]
        for i in range(2):
            layers.compute(range(i, i + 1))
            found.append(layers.hidden.clone())
    assert torch.equal(expected(runner, rounds(1), (0, 1, 2)), torch.cat(found, dim=-1))


def test_a_step_tells_the_residual_stream_of_its_rows(either: ModelRunner) -> None:
    steps = make_steps(either)
    steps.watch(make_features(either))
    for seed in range(2):
        assert_close(launch(steps, rounds(seed)).result().features, expected(either, rounds(seed)))


def test_rows_stay_until_the_step_after_the_next_one(runner: ModelRunner) -> None:
    """And what was taken of them stays for good."""
    steps = make_steps(runner)
    steps.watch(make_features(runner))
    first = launch(steps, rounds(1))
    second = launch(steps, rounds(2))
    told = first.result().features
    assert_close(told, expected(runner, rounds(1)))
    launch(steps, rounds(3))
    assert_close(second.result().features, expected(runner, rounds(2)))
    assert_close(told, expected(runner, rounds(1)))


def test_a_watch_may_come_and_change_while_a_step_is_in_flight(runner: ModelRunner) -> None:
    steps = make_steps(runner)
    before = launch(steps, rounds(1))
    steps.watch(make_features(runner))
    assert before.result().features is None
    flight = launch(steps, rounds(2))
    steps.watch(make_features(runner, (1,)))
    assert flight.result().features is None  # of other boundaries than readers expect now
    told = launch(steps, rounds(3)).result().features
    assert_close(told, expected(runner, rounds(3), (1,)))
    steps.watch(None)
    assert launch(steps, rounds(4)).result().features is None


@pytest.mark.parametrize("eager", [full_only(True), False], ids=["eager", "captured"])
def test_what_is_drawn_does_not_depend_on_who_reads(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    steps = make_steps(runner, eager, monkeypatch)
    with torch.inference_mode():
        steps.capture(DUMMY)
    features = make_features(runner)
    logits = []
    for told in (None, features, None):
        steps.watch(told)
        logits.append([launch(steps, rounds(seed)).result().logits for seed in range(2)])
    for others in logits[1:]:
        assert all(map(torch.equal, logits[0], others))


def test_graphs_that_tell_are_captured_when_they_are_asked_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_steps(runner, False, monkeypatch)
    with torch.inference_mode():
        steps.capture(DUMMY)
    plain = len(Graph.captured)
    assert launch(steps, rounds(1)).result().features is None
    features = make_features(runner)
    steps.watch(features)
    assert len(Graph.captured) == 2 * plain
    assert_close(launch(steps, rounds(2)).result().features, expected(runner, rounds(2)))

    steps.watch(None)
    for tap in features.taps:
        tap.out.fill_(7.0)
    assert launch(steps, rounds(3)).result().features is None
    launch(steps, rounds(4))
    assert all(bool((tap.out == 7.0).all()) for tap in features.taps)  # nothing is copied

    steps.watch(features)  # as when a link comes back
    assert len(Graph.captured) == 2 * plain
    assert_close(launch(steps, rounds(5)).result().features, expected(runner, rounds(5)))


def test_a_head_that_comes_while_steps_are_served_has_one_graph_captured_before_each(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_steps(runner, False, monkeypatch)
    with torch.inference_mode():
        steps.capture(DUMMY)
    plain = len(Graph.captured)
    monkeypatch.setattr(runner, "steps", steps)
    monkeypatch.setattr(runner, "make_step_features", partial(make_features, runner))
    feed = FeatureFeed(FeatureOptions(64))
    options = SpeculationOptions()
    speculator = SpeculationCoordinator(options, 512, feed=feed, clock=lambda: 0.0)
    served = FeatureWatch(runner, speculator)
    terms = FeatureTerms(FeatureNeeds(BOUNDARIES, 64, "float32"))
    speculator.endpoints.connected(DraftLinkUp(1, 1, False, 8, 2048, 5, features=terms))
    for captured in range(plain):
        served.follow()
        assert len(Graph.captured) == plain + captured + 1
        assert served.is_behind
        if captured == plain // 2:  # steps go on meanwhile, by the graphs that they have
            assert launch(steps, rounds(1)).result().features is None
    served.follow()
    assert len(Graph.captured) == 2 * plain
    assert not served.is_behind
    told = launch(steps, rounds(2)).result().features
    assert_close(told, expected(runner, rounds(2), feed.watched))
    runner.watch(())


def test_a_boundary_that_the_model_does_not_have_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ConfigError, match="boundary 4 is asked for: the model has 3 layers"):
        runner.watch((1, 4))
    with pytest.raises(ConfigError, match="boundary -1"):
        runner.watch((-1,))


@pytest.mark.parametrize("family", ["llama3-untied", full_only("olmo2")])
def test_the_first_of_several_ranks_tells_the_whole(tmp_path: Path, family: str) -> None:
    make_model(family, tmp_path)
    parts = [Chunk(list(range(3, 40)), 0, BLOCKS[0], 1), Chunk([5, 6], 0, BLOCKS[1], 2)]
    alone = make_runner(tmp_path)
    alone.watch((0, 2, 3))
    alone.forward(parts)
    shared: list[Tensor] = [torch.empty(0)] * 2
    barrier = threading.Barrier(2)

    def compute(rank: int) -> Any:
        runner = make_runner(tmp_path, tp=ThreadRanks(rank, shared, barrier))
        runner.watch((0, 2, 3))
        runner.forward(parts)
        return runner.features

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(compute, range(2))
    assert alone.features is not None
    assert_close(first, alone.features)
    assert other is None
