"""The self-check sees features that are not the residual stream."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ssd_engine.errors import SelfCheckError
from ssd_engine.execution import graphs, step_features
from ssd_engine.execution.graphs import GraphRunner
from ssd_engine.execution.step import Step
from ssd_engine.execution.step_features import DeviceTap, StepFeatures
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.self_check.features import FEATURES, FeatureCheck
from ssd_engine.self_check.findings import Findings
from tests.engine.execution.test_step_features import BLOCKS, DUMMY, SHAPE, Graph, emulated
from tests.harness import make_runner
from tests.random_models import make_model

__all__ = ["emulated"]  # a fixture
pytestmark = pytest.mark.usefixtures("quick_interpreter", "emulated")


def check(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Findings:
    make_model("llama3-untied", directory)
    runner = make_runner(directory, kernels="torch")
    del runner.model.weights.layers[2:], runner.kv.layers[2:]
    runner.dummy_slot = DUMMY

    def make(boundaries: tuple[int, ...]) -> StepFeatures:
        return StepFeatures(runner.model, boundaries, SHAPE.padded_rows, 2, overlap=False)

    monkeypatch.setattr(runner, "make_step_features", make)
    one = Step(runner.model, runner.kv, SHAPE, 1, num_sides=2)
    monkeypatch.setattr(graphs, "capture_graph", lambda run, memory: (Graph(one, run), memory))
    rng, findings = random.Random(1), Findings(torch.float32, "model")
    parts = [
        Chunk([rng.randrange(512) for _ in range(3 - i)], 40, BLOCKS[i], 3 - i) for i in range(2)
    ]
    with torch.inference_mode():
        checked = FeatureCheck(runner, one, parts, findings)
        checked.run(GraphRunner([one], eager=False), "step", "--eager")
    assert one.layers.tap is None
    assert not runner.kv.pool[:, :20].any()
    findings.raise_if_wrong(SingleRank())
    return findings


def test_features_that_are_right_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = check(tmp_path, monkeypatch)
    assert {place.operation for place, _ in findings.errors()} == {FEATURES}
    assert len(findings.errors()) == 4  # as often as a step is captured


def test_features_of_another_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = DeviceTap._copy

    def late(self: DeviceTap, hidden: Tensor, place: int) -> None:
        copy(self, hidden + (1e-6 if place else 0.0), place)

    monkeypatch.setattr(DeviceTap, "_copy", late)
    with pytest.raises(SelfCheckError, match=r"residual stream of a step of 5 rows .*--eager"):
        check(tmp_path, monkeypatch)


def test_rows_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter:
        """A kernel whose grid lacks a row."""

        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return self._kernel[grid[0], 4]

    monkeypatch.setattr(step_features, "tap_kernel", Shorter(step_features.tap_kernel))
    with pytest.raises(SelfCheckError, match="residual stream"):
        check(tmp_path, monkeypatch)
