"""A head's captured steps are held against its plain forward before it serves."""

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssd_engine.checkpoints.heads.head_checkpoint import HeadCheckpoint
from ssd_engine.checkpoints.heads.head_config import HeadConfig
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Rows, TreeRows, slots_of
from ssd_engine.self_check.expected import unit_of
from ssd_engine.self_check.findings import CheckedOperation, Findings
from ssd_engine.self_check.workload import (
    CheckRoom,
    clear_context,
    fill_context,
    round_parts,
    tree_parts,
    used_blocks,
)

if TYPE_CHECKING:
    from ssd_engine.execution.step import Step

log = logging.getLogger(__name__)

STEP, TREE = "head's step", "head's tree step"
LOGITS, STATES = "logits", "state for the next row"
REMEDY = "--kernels torch computes it by torch's own operations"


def load_checked_head(
    config: HeadConfig, checkpoint: HeadCheckpoint, options: RunnerOptions, num_tokens: int
) -> HeadRunner:
    """A head that serves: it is checked where the options say so."""
    runner = HeadRunner(config, checkpoint, options, num_tokens)
    if options.self_check:
        check_head(runner)
    return runner


@torch.inference_mode()
def check_head(runner: HeadRunner) -> Findings:
    """Raises SelfCheckError when a captured step gives something else than the plain forward of the
    same rows, by more than rounding. Leaves the head as it was."""
    begin = time.monotonic()
    findings = Findings(runner.model.weights.norm.dtype, runner.options.directory.name)
    room = CheckRoom(runner.options, runner.num_blocks, runner.config.vocab_size)
    if runner.steps is not None:
        for step in runner.steps.steps:
            for parts in _step_parts(room, step):
                HeadStepCheck(runner, parts, findings).run()
    findings.raise_if_wrong(runner.tp)
    log.info(
        "self-check of the head passed in %.1f s: the worst of %d results is off by %.1f roundings",
        time.monotonic() - begin,
        len(findings.errors()),
        max((error for _, error in findings.errors()), default=0.0),
    )
    return findings


def _step_parts(room: CheckRoom, step: "Step") -> list[list[Rows]]:
    """Rounds and trees, as a step of this shape is asked for them."""
    shape, options = step.shape, room.options
    rows_per_run = min(shape.rows_per_run, options.step_rows)
    found = [round_parts(room, shape.runs, rows_per_run, shape.rows)]
    if options.branches and shape.rows_per_run >= options.branches:
        found.append(tree_parts(room, shape.runs, options.branches, shape.rows, 0))
    rows = [[part for part in parts if isinstance(part, Rows)] for parts in found]
    return [parts for parts in rows if parts]


class HeadStepCheck:
    """One step, of whose rows some are told, and some go on from what was left before."""

    def __init__(self, runner: HeadRunner, parts: Sequence[Rows], findings: Findings) -> None:
        self._runner, self._parts, self._findings = runner, list(parts), findings
        self._use = TREE if any(isinstance(part, TreeRows) for part in parts) else STEP
        size = runner.options.block_size
        self._num_rows = sum(len(part.tokens) for part in parts)
        self._slots = [slot for part in parts for slot in slots_of(part, size)]
        blocks = used_blocks(runner.kv, parts)
        self._used = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()

    def run(self) -> None:
        runner, given = self._runner, self._given()
        fill_context(runner.kv, self._parts)
        self._fill_states()
        expected = runner.forward_with_features(self._parts, given)
        left = runner.states[self._slots].clone()
        self._fill_states()  # a row reads what was left before this forward
        draws = [None] * sum(part.num_logits for part in self._parts)
        got = runner.step_with_features(self._parts, draws, given).result().logits
        if expected is None:
            raise RuntimeError("a head runs on one rank")
        drafted = expected.isfinite()
        self._compare(LOGITS, torch.where(drafted, got, 0.0), torch.where(drafted, expected, 0.0))
        place = self._place(LOGITS)
        self._findings.compare_bits(place, got.isneginf() | drafted, torch.ones_like(drafted))
        self._compare(STATES, runner.states[self._slots], left)
        runner.states[self._used] = 0
        clear_context(runner.kv, self._parts)

    def _given(self) -> GivenFeatures:
        """Features of every second chunk as a whole, and of the first half of the others."""
        counts: list[int] = []
        for i, part in enumerate(self._parts):
            rows = 0 if isinstance(part, TreeRows) else len(part.tokens)
            counts.append(rows if i % 2 == 0 else rows // 2)
        return GivenFeatures(counts, self._random(sum(counts), self._runner.feature_width))

    def _fill_states(self) -> None:
        """What earlier rows have left: any will do, as long as no two are equal."""
        states = self._runner.states
        states[self._used] = self._random(len(self._used), states.shape[1])

    def _random(self, rows: int, width: int) -> Tensor:
        like = self._runner.states
        generator = torch.Generator(like.device).manual_seed(rows)
        return torch.randn((rows, width), generator=generator, device=like.device).to(like.dtype)

    def _place(self, operation: str) -> CheckedOperation:
        return CheckedOperation(self._use, self._num_rows, None, operation, REMEDY)

    def _compare(self, operation: str, got: Tensor, expected: Tensor) -> None:
        """The error of a row against its size, in roundings. Sums in float32 have some, too, and
        each layer adds its own."""
        got, expected = got.float(), expected.float()
        size = expected.square().sum(dim=1).sqrt()
        error = (got - expected).square().sum(dim=1).sqrt() / size
        sums = math.sqrt(self._runner.feature_width) * unit_of(torch.float32)
        unit = unit_of(self._runner.states.dtype) + sums
        unit *= math.sqrt(len(self._runner.kv.layers))
        self._findings.note(self._place(operation), (error / unit).max())
