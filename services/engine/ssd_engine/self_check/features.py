"""What a captured step tells of its rows is held against what the same step computes eagerly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Part
from ssd_engine.models.features import FeatureTap
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.workload import clear_context, fill_context

if TYPE_CHECKING:
    from ssd_engine.execution.graphs import GraphRunner
    from ssd_engine.execution.step import Step
    from ssd_engine.execution.step_features import StepFeatures

FEATURES = "residual stream"


class FeatureCheck:
    """A target's step: features are copied between its operations, and must be these very bits."""

    def __init__(
        self, runner: ModelRunner, step: "Step", parts: Sequence[Part], findings: Findings
    ) -> None:
        from ssd_engine.execution.graphs import step_runs

        self._runner, self._step, self._parts, self._findings = runner, step, parts, findings
        self._num_rows = sum(len(part.tokens) for part in parts)
        draws = [None] * sum(part.num_logits for part in parts)
        self._runs, self._moves = step_runs(parts, draws, runner.options.block_size)

    def run(self, graphs: "GraphRunner", use: str, remedy: str) -> None:
        """``graphs``: of this step alone."""
        runner, step = self._runner, self._step
        place = CheckedOperation(use, self._num_rows, None, FEATURES, remedy)
        fill_context(runner.kv, self._parts)
        features = self._features()
        expected = self._computed_eagerly(features.boundaries)
        graphs.watch(features)
        for side in range(step.num_sides):
            for turn in range(graphs.num_replays(step, side)):
                self._fill_inputs(side)
                features.taps[side].out.zero_()
                graphs.replay(step, side, turn)
                got = features.rows(side, self._num_rows)
                self._findings.compare_bits(place, got, expected)
                runner.wait()  # the host's block is filled anew
        graphs.watch(None)
        step.inputs.clear(runner.dummy_slot)
        step.use(0)
        clear_context(runner.kv, self._parts)

    def _features(self) -> "StepFeatures":
        """Before the first layer, between the pieces of a step, in the middle, after the last."""
        from ssd_engine.execution.step import LEADING_LAYERS

        last = len(self._runner.kv.layers)
        boundaries = sorted({0, min(LEADING_LAYERS, last), (last + 1) // 2, last})
        return self._runner.make_step_features(tuple(boundaries))

    def _computed_eagerly(self, boundaries: Sequence[int]) -> Tensor:
        """Copied by plain torch."""
        step, width = self._step, self._runner.config.hidden_size
        self._fill_inputs(0)
        norm = self._runner.model.weights.norm
        rows = norm.new_zeros(step.shape.padded_rows, len(boundaries) * width)
        step.layers.tap = FeatureTap(boundaries, rows)
        step.compute()
        return rows[: self._num_rows]

    def _fill_inputs(self, side: int) -> None:
        self._step.use(side)
        self._step.inputs.fill(self._runs, self._runner.dummy_slot, self._moves)
