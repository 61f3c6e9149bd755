"""Steps tell the residual stream of their rows where it is watched: interpreted kernels."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd_engine.errors import ConfigError
from ssd_engine.execution import graphs, step_features
from ssd_engine.execution.graphs import GraphRunner, InFlight
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.execution.step_features import StepFeatures
from ssd_engine.forward.batch import Chunk, Drawing
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_target.engine.feature_watch import FeatureWatch
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from tests.engine.execution.emulated_device import (
    BLOCKS,
    DUMMY,
    SHAPE,
    Graph,
    emulate,
    small_runner,
    with_prompts,
)

pytestmark = pytest.mark.usefixtures("quick_interpreter")

# Of two layers, the first of which is in the first piece of a captured step.
BOUNDARIES = (2, 0, 1)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(step_features, "PIECE", 64)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return with_prompts(small_runner(tmp_path_factory.mktemp("model")))


def make_steps(runner: ModelRunner) -> GraphRunner:
    """Of one shape and one way of drawing."""
    one = Step(runner.model, runner.kv, SHAPE, 1, num_sides=2)
    one.drawings = [Drawing.PLAIN]
    one.inputs.clear(DUMMY)
    return GraphRunner([one], eager=True)


def captured_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> GraphRunner:
    steps = make_steps(runner)
    steps.eager, (one,) = False, steps.steps
    monkeypatch.setattr(graphs, "capture_graph", lambda run, memory: (Graph(one, run), memory))
    with torch.inference_mode():
        steps.capture(DUMMY)
    return steps


def make_features(runner: ModelRunner, boundaries: Sequence[int] = BOUNDARIES) -> StepFeatures:
    return StepFeatures(runner.model, boundaries, SHAPE.padded_rows, 2, overlap=False)


def rounds(seed: int) -> list[Chunk]:
    """Two sequences, whose rows leave room for some that pad."""
    rng = random.Random(seed)
    return [
        Chunk([rng.randrange(512) for _ in range(width)], 120 - 5 * i, BLOCKS[i], width)
        for i, width in enumerate((2, 1))
    ]


def launch(steps: GraphRunner, parts: Sequence[Chunk]) -> InFlight:
    return steps.launch(parts, [None] * sum(part.num_logits for part in parts), DUMMY)


def expected(
    runner: ModelRunner, parts: Sequence[Chunk], boundaries: Sequence[int] = BOUNDARIES
) -> Tensor:
    """What the plain forward tells."""
    layers = runner.prompt_layers(parts)
    with torch.inference_mode():
        return layers.forward_with_features(boundaries)[1]


def assert_close(got: Tensor | None, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama3-untied", "olmo2", "qwen3"])
def test_a_step_tells_the_residual_stream_of_its_rows(family: str, tmp_path: Path) -> None:
    runner = with_prompts(small_runner(tmp_path, family))
    steps = make_steps(runner)
    steps.watch(make_features(runner))
    assert_close(launch(steps, rounds(1)).result().features, expected(runner, rounds(1)))


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


def test_graphs_that_tell_are_captured_when_they_are_asked_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is drawn does not depend on who reads."""
    steps, features = captured_steps(runner, monkeypatch), make_features(runner)
    plain = len(Graph.captured)
    alone = launch(steps, rounds(1)).result()
    assert alone.features is None
    steps.watch(features)
    assert len(Graph.captured) == 2 * plain
    told = launch(steps, rounds(1)).result()
    assert_close(told.features, expected(runner, rounds(1)))
    assert torch.equal(told.logits, alone.logits)

    steps.watch(None)
    for tap in features.taps:
        tap.out.fill_(7.0)
    assert launch(steps, rounds(1)).result().features is None
    launch(steps, rounds(4))
    assert all(bool((tap.out == 7.0).all()) for tap in features.taps)  # nothing is copied

    steps.watch(features)  # as when a link comes back
    assert len(Graph.captured) == 2 * plain
    assert_close(launch(steps, rounds(5)).result().features, expected(runner, rounds(5)))


def test_a_head_that_comes_while_steps_are_served_has_one_graph_captured_before_each(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = captured_steps(runner, monkeypatch)
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
    for boundary in (4, -1):
        words = f"boundary {boundary} is asked for: the model has 3 layers"
        with pytest.raises(ConfigError, match=words):
            runner.watch((1, boundary))
