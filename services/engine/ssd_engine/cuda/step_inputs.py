"""What a step of few rows is told: one block of integers, filled on the host, copied at once.

The copy is part of the captured step, so the addresses on both sides are fixed. Block tables are
written as they grow: a sequence that stays in its place costs a round only what is new.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ssd_engine.batch import Draw


@dataclass(frozen=True)
class StepShape:
    """The sizes that a step is compiled and captured for."""

    rows: int
    runs: int
    rows_per_run: int  # at most
    max_positions: int
    block_size: int
    scratch: int = 0  # slots of a run's branches, at most; 0: no trees
    moves: int = 0  # tokens whose KV is moved first, at most

    @property
    def table_width(self) -> int:
        return -(-self.max_positions // self.block_size)

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // 8) * 8


@dataclass(frozen=True, slots=True)
class StepRun:
    """Rows of one sequence. Row i writes its KV to ``slots[i]`` and sees positions up to
    ``limits[i]``; in a tree also its own branch's part of ``scratch``, one slot for each row and
    depth."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    limits: Sequence[int]
    blocks: Sequence[int]
    scratch: Sequence[int] = ()
    draws: Sequence[Draw | None] = field(default=())  # one for each row, or none at all


class StepInputs:
    def __init__(self, shape: StepShape, device: torch.device) -> None:
        rows, runs = shape.rows, shape.runs
        sizes = {
            "seeds": 2 * rows,  # int64: first, so that it is aligned
            "tokens": rows + 1,
            "positions": rows,
            "slots": rows,
            "limits": rows,
            "branches": rows,
            "draw_positions": rows,
            "temperatures": rows,
            "run_begin": runs,
            "run_rows": runs,
            "run_end": runs,
            "run_branches": runs,
            "run_depths": runs,
            "num_moves": 1,
            "sources": shape.moves,
            "targets": shape.moves,
            "scratch": runs * shape.scratch,
            "tables": runs * shape.table_width,
        }
        ends = np.cumsum([0, *sizes.values()])
        spans = {
            name: slice(int(a), int(b)) for name, (a, b) in zip(sizes, pairwise(ends), strict=True)
        }
        pinned = device.type == "cuda"
        self.shape = shape
        self.host = torch.zeros(int(ends[-1]), dtype=torch.int32, pin_memory=pinned)
        self.device = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        self._on_host = {name: self.host.numpy()[span] for name, span in spans.items()}
        self._on_device = {name: self.device[span] for name, span in spans.items()}
        self._host_seeds = self._on_host["seeds"].view(np.int64)
        self._host_temperatures = self._on_host["temperatures"].view(np.float32)
        self._host_tables = self._on_host["tables"].reshape(runs, -1)
        self._host_scratch = self._on_host["scratch"].reshape(runs, -1)
        self._written: list[tuple[Sequence[int], int]] = [((), 0)] * runs
        self._live_rows = self._live_runs = 0

    def __getitem__(self, name: str) -> Tensor:
        """Of the device's side."""
        part = self._on_device[name]
        if name == "seeds":
            return part.view(torch.int64)
        return part.view(torch.float32) if name == "temperatures" else part

    def clear(self, dummy_slot: int) -> None:
        """All rows and runs are padding."""
        self.host.zero_()
        self._on_host["slots"][:] = dummy_slot
        self._written = [((), 0)] * self.shape.runs
        self._live_rows = self._live_runs = 0

    def copy(self) -> None:
        self.device.copy_(self.host, non_blocking=True)

    def fill(
        self, runs: Sequence[StepRun], dummy_slot: int, moves: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """Returns the first row of each run. Rows and runs beyond are padding: they write to the
        dummy slot and see nothing."""
        host, row, begins = self._on_host, 0, []
        for i, run in enumerate(runs):
            begins.append(row)
            self._fill_run(i, run, row)
            row += len(run.tokens)
        host["slots"][row : max(row, self._live_rows)] = dummy_slot
        for name in ("run_rows", "run_end"):
            host[name][len(runs) : max(len(runs), self._live_runs)] = 0
        self._live_rows, self._live_runs = row, len(runs)
        if self.shape.moves:
            host["num_moves"][0] = len(moves)
            if moves:
                host["sources"][: len(moves)] = [source for source, _ in moves]
                host["targets"][: len(moves)] = [target for _, target in moves]
        return begins

    def _fill_run(self, i: int, run: StepRun, row: int) -> None:
        host, count = self._on_host, len(run.tokens)
        rows = slice(row, row + count)
        host["tokens"][rows] = run.tokens
        host["positions"][rows] = run.positions
        host["slots"][rows] = run.slots
        host["limits"][rows] = run.limits
        host["run_begin"][i], host["run_rows"][i] = row, count
        host["run_end"][i] = max(run.limits) + 1
        if self.shape.scratch:
            host["branches"][rows] = np.arange(count)
            host["run_branches"][i] = count
            host["run_depths"][i] = len(run.scratch) // count
            self._host_scratch[i, : len(run.scratch)] = run.scratch
        for at, draw in enumerate(run.draws, start=row):
            if draw is None:
                self._host_temperatures[at] = 0.0
                continue
            self._host_temperatures[at] = draw.temperature
            self._host_seeds[at] = draw.signed_seed
            host["draw_positions"][at] = draw.position
        self._fill_table(i, run.blocks)

    def _fill_table(self, i: int, blocks: Sequence[int]) -> None:
        """A sequence's list of blocks only ever grows."""
        known, count = self._written[i]
        if known is not blocks or count > len(blocks):
            count = 0
        if count < len(blocks):
            self._host_tables[i, count : len(blocks)] = blocks[count:]
        self._written[i] = (blocks, len(blocks))
