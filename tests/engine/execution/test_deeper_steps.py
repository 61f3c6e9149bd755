"""One depth of trees after the other: the device is told what changes, which is little."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ssd_engine.execution.graphs import step_runs
from ssd_engine.forward.batch import Chunk, Draw, TreeRows
from ssd_engine.forward.step_inputs import StepInputs, StepShape

BLOCK, DUMMY = 16, 4096
SHAPE = StepShape(
    rows=24, runs=4, rows_per_run=12, max_positions=256, block_size=BLOCK, scratch=48, moves=4
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "rejecting": {"width": 3, "down_weight": 0.5},
}


def tree(number: int, branches: int, depth: int) -> TreeRows:
    context = 40 * (number + 1)
    scratch = [2000 + 100 * number + 7 * i % 90 for i in range(branches * (depth + 1))]
    return TreeRows(
        tokens=[300 + i for i in range(branches)],
        positions=[context + depth + i % 3 for i in range(branches)],
        limits=[context + i % 3 - 1 for i in range(branches)],
        slots=scratch[-branches:],
        context=context,
        blocks=list(range(16 * number, 16 * number + 12)),
        scratch=scratch,
    )


def draws(trees: list[TreeRows], how: dict[str, Any]) -> list[Draw | None]:
    return [Draw(9 + i, 0.7, p + 1, **how) for i, t in enumerate(trees) for p in t.positions]


def told(inputs: StepInputs, side: int) -> dict[str, list[Any]]:
    """All that a step reads of its rows and runs."""
    host = inputs.sides[side]
    rows, runs = host.live_rows, host.live_runs
    numbers = {name: part for name, part in host.numbers.items() if name != "sources"}
    read: dict[str, list[Any]] = {}
    for name, part in numbers.items():
        wide = 2 if name in ("seeds", "top_p") else 1
        live = runs if name.startswith("run_") else wide * rows
        read[name] = part[: 1 if name == "num_moves" else live].tolist()
    if inputs.shape.scratch:
        lengths = host.numbers["run_branches"] * host.numbers["run_depths"]
        read["scratch"] = [host.scratch[i, : lengths[i]].tolist() for i in range(runs)]
    read["tables"] = [host.tables[i, :12].tolist() for i in range(runs)]
    read["idle"] = np.unique(host.numbers["slots"][rows:]).tolist()
    read.pop("targets")
    return read


Told = tuple[list[Any], list[Draw | None]]  # parts, and how their rows are drawn


def trees(branches: tuple[int, ...], depth: int, how: dict[str, Any]) -> Told:
    at = [tree(i, count, depth) for i, count in enumerate(branches)]
    return at, draws(at, how)


def chains(branches: tuple[int, ...], depth: int, how: dict[str, Any]) -> Told:
    """Single tokens, as many as there are branches; some come to another block."""
    starts = [(30, 14, 100)[i % 3] + depth for i in range(len(branches))]
    blocks = [list(range(20 * i, 20 * i + 12)) for i in range(len(branches))]
    parts = [Chunk([5], start, own, 1) for start, own in zip(starts, blocks, strict=True)]
    return parts, [Draw(9, 0.7, part.end, **how) for part in parts]


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("parts_at", "branches"), [(trees, (12,)), (trees, (5, 8, 3)), (chains, (1, 1, 1))]
)
def test_deeper_is_the_same_as_said_in_full(
    parts_at: Callable[..., Told], branches: tuple[int, ...], how: dict[str, Any]
) -> None:
    few = dict(rows=8, rows_per_run=2, scratch=0, moves=0)
    shape = replace(SHAPE, **(few if parts_at is chains else {}))
    inputs, fresh = (StepInputs(shape, torch.device("cpu"), sides=2) for _ in range(2))
    for each in (inputs, fresh):
        each.clear(DUMMY)
    moves = [(1, 2)] if shape.moves else []
    inputs.fill(step_runs(*parts_at(branches, 0, how), BLOCK)[0], DUMMY, moves)
    for depth in (1, 2):
        width = how["width"] + depth * bool(shape.scratch) if "width" in how else -1
        now = {**how, "width": width} if "width" in how else how
        parts, drawn = parts_at(branches, depth, now)
        rows = iter(range(len(drawn)))
        said = [replace(each, tokens=[-next(rows) - 1 for _ in each.tokens]) for each in parts]
        runs, _ = step_runs(said, drawn, BLOCK)
        slots = [slot for run in runs for slot in run.slots]
        inputs.use(depth % 2)
        assert inputs.deepen(1 - depth % 2, slots, [width] * len(slots))
        fresh.use(depth % 2)
        fresh.fill(runs, DUMMY)
        assert told(inputs, depth % 2) == told(fresh, depth % 2)


def test_no_deeper_than_there_is_scratch() -> None:
    inputs = StepInputs(SHAPE, torch.device("cpu"), sides=2)
    inputs.clear(DUMMY)
    last = [tree(0, 12, 3)]
    inputs.fill(step_runs(last, draws(last, {}), BLOCK)[0], DUMMY)
    inputs.use(1)
    assert not inputs.deepen(0, list(range(12)), [-1] * 12)
