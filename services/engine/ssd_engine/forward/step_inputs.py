"""What a step of few rows is told: one block of integers, filled on the host, copied at once.

The copy is part of the captured step, so the addresses on both sides are fixed. Block tables are
written as they grow: a sequence that stays in its place costs a round only what is new.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.batch import Draw


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
    path: int = 0  # tokens of a draft before a row's own, at most

    @property
    def table_width(self) -> int:
        return -(-self.max_positions // self.block_size)

    @property
    def new_tokens(self) -> int:
        """How many tokens histories may get between two steps: for every sequence a whole path of
        guesses that were right, and one more."""
        return max(self.rows, self.runs * (self.path + 1))

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // 8) * 8


class StepRun(NamedTuple):
    """Rows of one sequence. Row i writes its KV to ``slots[i]`` and sees positions up to
    ``limits[i]``; in a tree also its own branch's part of ``scratch``, one slot for each row and
    depth. A token -n - 1 is the best one of row n of the step before.

    Positions from ``new`` on are written by this step, in the rows of run ``source``: its own for
    consecutive tokens; for a tree those of the same sequence, where there are any."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    limits: Sequence[int]
    blocks: Sequence[int]
    scratch: Sequence[int] = ()
    new: int = 0
    source: int = 0
    draws: Sequence[Draw | None] = ()  # one for each row, or none at all


_NO_DRAW = Draw(0, 0.0, 0)
KINDS = {
    "seeds": torch.int64,
    "temperatures": torch.float32,
    "top_p": torch.float64,
    "log_min_p": torch.float32,
    "down_weights": torch.float32,
}


class _Host:
    """One block of pinned memory, and what was written of each table in it."""

    def __init__(self, size: int, spans: dict[str, slice], runs: int, pinned: bool) -> None:
        self.block = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        arrays = {name: self.block.numpy()[span] for name, span in spans.items()}
        self.numbers = arrays
        # Views, because a few numbers are written to one in a third of the time.
        self.part = {name: part.data for name, part in arrays.items()}
        self.seeds = arrays["seeds"].view(np.int64)
        self.temperatures = arrays["temperatures"].view(np.float32)
        self.top_p = arrays["top_p"].view(np.float64)
        self.log_min_p = arrays["log_min_p"].view(np.float32)
        self.down_weights = arrays["down_weights"].view(np.float32)
        self.filtered = 0  # rows, from the first, of which some may be filtered
        self.weighted = 0  # likewise, of which some may be drawn for rejection
        self.reported = 0  # likewise, of which some may be reported
        self.tables = arrays["tables"].reshape(runs, -1)
        self.scratch = arrays["scratch"].reshape(runs, -1)
        self.written: list[tuple[Sequence[int], int]] = [((), 0)] * runs
        self.live_rows = self.live_runs = 0

    def follow(self, other: "_Host") -> None:
        """Copies all that the other one holds."""
        np.copyto(self.block.numpy(), other.block.numpy())
        self.written = list(other.written)
        self.live_rows, self.live_runs = other.live_rows, other.live_runs
        self.filtered, self.weighted = other.filtered, other.weighted
        self.reported = other.reported


class StepInputs:
    """The inputs of steps of one shape. With two ``sides``, one step can be filled while the copy
    of another is still to come."""

    def __init__(self, shape: StepShape, device: torch.device, sides: int = 1) -> None:
        rows, runs = shape.rows, shape.runs
        sizes = {
            "seeds": 2 * rows,  # int64: first, so that it is aligned
            "top_p": 2 * rows,  # float64
            "tokens": rows + 1,
            "positions": rows,
            "slots": rows,
            "limits": rows,
            "branches": rows,
            "draw_positions": rows,
            "temperatures": rows,
            "top_k": rows,
            "log_min_p": rows,
            "widths": rows,
            "top_logprobs": rows,
            "down_weights": rows,
            "run_begin": runs,
            "run_rows": runs,
            "run_end": runs,
            "run_new": runs,
            "run_source": runs,
            "run_branches": runs,
            "run_depths": runs,
            "num_moves": 1,
            "sources": shape.moves,
            "targets": shape.moves,
            "scratch": runs * shape.scratch,
            "tables": runs * shape.table_width,
        }
        spans, size = _spans(sizes)
        pinned = device.type == "cuda"
        self.shape = shape
        self.sides = [_Host(size, spans, runs, pinned) for _ in range(sides)]
        self._host = self.sides[0]
        self._following = -1 - np.arange(rows, dtype=np.int32)  # what each row has drawn
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_device = {name: self.device[span] for name, span in spans.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The input of this name, on the device."""
        part = self._on_device[name]
        return part.view(KINDS[name]) if name in KINDS else part

    def use(self, side: int) -> None:
        self._host = self.sides[side]

    def clear(self, dummy_slot: int) -> None:
        """Makes all rows and runs padding."""
        for host in self.sides:
            host.block.zero_()
            host.top_p[:], host.log_min_p[:], host.filtered = 1.0, -np.inf, 0
            host.part["widths"][:] = _ints([-1] * self.shape.rows)
            host.weighted = host.reported = 0
            host.part["slots"][:] = _ints([dummy_slot] * self.shape.rows)
            host.written = [((), 0)] * self.shape.runs
            host.live_rows = host.live_runs = 0

    def copy(self) -> None:
        self.device.copy_(self._host.block, non_blocking=True)

    def fill(
        self, runs: Sequence[StepRun], dummy_slot: int, moves: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """Returns the first row of each run. Rows and runs beyond are padding: they write to the
        dummy slot and see nothing."""
        host = self._host.part
        *begins, row = accumulate((len(run.tokens) for run in runs), initial=0)
        for i, run in enumerate(runs):
            self._fill_run(i, run, begins[i])
        draws = [draw for run in runs for draw in run.draws]
        self._fill_filters(draws)
        self._fill_weights(draws)
        self._fill_reports(draws)
        count = len(runs)
        # One assignment for all runs: each of them costs about as much as a row of Python.
        host["tokens"][:row] = _ints([token for run in runs for token in run.tokens])
        host["positions"][:row] = _ints([position for run in runs for position in run.positions])
        host["slots"][:row] = _ints([slot for run in runs for slot in run.slots])
        host["limits"][:row] = _ints([limit for run in runs for limit in run.limits])
        host["run_begin"][:count] = _ints(begins)
        host["run_rows"][:count] = _ints([len(run.tokens) for run in runs])
        host["run_end"][:count] = _ints([max(run.limits) + 1 for run in runs])
        host["run_new"][:count] = _ints([run.new for run in runs])
        host["run_source"][:count] = _ints([begins[run.source] for run in runs])
        if (idle := self._host.live_rows - row) > 0:
            host["slots"][row : row + idle] = _ints([dummy_slot] * idle)
        if (idle := self._host.live_runs - count) > 0:
            for name in ("run_rows", "run_end", "run_depths"):
                host[name][count : count + idle] = _ints([0] * idle)
        self._host.live_rows, self._host.live_runs = row, count
        if self.shape.moves:
            host["num_moves"][0] = len(moves)
            if moves:
                host["sources"][: len(moves)] = _ints([source for source, _ in moves])
                host["targets"][: len(moves)] = _ints([target for _, target in moves])
        return begins

    def deepen(self, source: int, slots: Sequence[int], widths: Sequence[int]) -> bool:
        """Fills in the other side's step, one token further: each row goes on from its own.
        Trees get a depth, runs of one row are of the next position. False where the scratch has no
        room for that.

        Most of it stays as it is. ``widths``: of rows that are drawn for rejection.
        """
        before, host = self.sides[source], self._host
        rows, runs = before.live_rows, before.live_runs
        if not self._fits_deeper(before):
            return False
        host.follow(before)
        part = host.numbers
        part["tokens"][:rows] = self._following[:rows]
        part["positions"][:rows] += 1
        part["draw_positions"][:rows] += 1
        host.part["slots"][:rows] = _ints(slots)
        depths = part["run_depths"][:runs].tolist()
        for i, begin in enumerate(part["run_begin"][:runs].tolist()):
            if depth := depths[i]:
                count = int(part["run_branches"][i])
                own = slots[begin : begin + count]
                host.scratch[i, count * depth : count * (depth + 1)] = own
                part["run_depths"][i] += 1
            else:
                part["limits"][begin] += 1
                part["run_end"][i] += 1
                part["run_new"][i] += 1
        if host.weighted:
            host.part["widths"][:rows] = _ints(widths)
        if self.shape.moves:
            host.part["num_moves"][0] = 0
        return True

    def _fits_deeper(self, host: _Host) -> bool:
        part, runs = host.numbers, host.live_runs
        branches, depths = part["run_branches"][:runs], part["run_depths"][:runs]
        slots = np.where(depths > 0, branches * (depths + 1), 0)
        return bool((slots <= self.shape.scratch).all())

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What each row is given."""
        return self._host.numbers["tokens"]

    def put_tokens(self, tokens: Sequence[int]) -> None:
        """Fill in the tokens of a step that has everything else."""
        self._host.part["tokens"][: len(tokens)] = _ints(tokens)

    def _fill_run(self, i: int, run: StepRun, row: int) -> None:
        host, count = self._host.part, len(run.tokens)
        if self.shape.scratch:
            host["branches"][row : row + count] = _ints(range(count))
            host["run_branches"][i] = count
            host["run_depths"][i] = len(run.scratch) // count
            self._host.scratch[i, : len(run.scratch)] = run.scratch
        positions, seeds = host["draw_positions"], self._host.seeds
        temperatures = self._host.temperatures
        for at, draw in enumerate(run.draws, start=row):
            if draw is None:
                temperatures[at] = 0.0
                continue
            temperatures[at] = draw.temperature
            seeds[at] = draw.signed_seed
            positions[at] = draw.position
        self._fill_table(i, run.blocks)

    def _fill_filters(self, draws: Sequence[Draw | None]) -> None:
        """``draws``: one for each row. What pads a step, or is not drawn, has no filters."""
        host = self._host
        if not any(draw is not None and draw.filters for draw in draws):
            draws = ()
        if told := _replacing(draws, host.filtered):
            host.part["top_k"][: len(told)] = _ints([draw.top_k for draw in told])
            host.top_p[: len(told)] = [draw.top_p for draw in told]
            host.log_min_p[: len(told)] = [_log(draw.min_p) for draw in told]
        host.filtered = len(draws)

    def _fill_weights(self, draws: Sequence[Draw | None]) -> None:
        """Down-weights of rows that are drawn for rejection; all others are coupled."""
        host = self._host
        if not any(draw is not None and draw.width >= 0 for draw in draws):
            draws = ()
        if told := _replacing(draws, host.weighted):
            host.part["widths"][: len(told)] = _ints([draw.width for draw in told])
            host.down_weights[: len(told)] = [draw.down_weight for draw in told]
        host.weighted = len(draws)

    def _fill_reports(self, draws: Sequence[Draw | None]) -> None:
        """How many of the likeliest tokens each row is reported with."""
        host = self._host
        if not any(draw is not None and draw.top_logprobs > 0 for draw in draws):
            draws = ()
        if told := _replacing(draws, host.reported):
            counts = _ints([max(0, draw.top_logprobs) for draw in told])
            host.part["top_logprobs"][: len(told)] = counts
        host.reported = len(draws)

    def _fill_table(self, i: int, blocks: Sequence[int]) -> None:
        """A sequence's list of blocks only ever grows."""
        known, count = self._host.written[i]
        if known is not blocks or count > len(blocks):
            count = 0
        if count < len(blocks):
            self._host.tables[i, count : len(blocks)] = blocks[count:]
        self._host.written[i] = (blocks, len(blocks))


class HistoryInputs:
    """Further inputs of a step with penalties or bias. They have a copy of their own, which other
    steps do without."""

    def __init__(self, shape: StepShape, device: torch.device, sides: int = 1) -> None:
        rows = shape.rows
        sizes = {
            "num_new": 1,
            "new_places": shape.new_tokens,
            "new_tokens": shape.new_tokens,
            "places": rows,
            "recent": rows,
            "path_lengths": rows,
            "chained": rows,
            "held": rows,
            "paths": rows * shape.path,
        }
        spans, size = _spans(sizes)
        self.shape = shape
        pinned = device.type == "cuda"
        self._blocks = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(sides)
        ]
        self._arrays = [
            {name: block.numpy()[span] for name, span in spans.items()} for block in self._blocks
        ]
        self._hosts = [
            {name: part.data for name, part in arrays.items()} for arrays in self._arrays
        ]
        self._side = 0
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_device = {name: self._device[span] for name, span in spans.items()}
        for side in reversed(range(sides)):
            self.use(side)
            self.put((), ())

    def __getitem__(self, name: str) -> Tensor:
        """A part of the block, on the device."""
        return self._on_device[name]

    def use(self, side: int) -> None:
        self._side = side

    def copy(self) -> None:
        self._device.copy_(self._blocks[self._side], non_blocking=True)

    def put(self, told: Sequence[tuple[int, int, Draw]], added: Sequence[tuple[int, int]]) -> None:
        """``told``: rows, the places of their histories, and how they are drawn. ``added``: tokens
        that are added to histories, after their places."""
        host, rows, width = self._hosts[self._side], self.shape.rows, self.shape.path
        places, recent, lengths, held = [-1] * rows, [0] * rows, [0] * rows, [0] * rows
        for row, place, draw in told:
            path = draw.path[-width:] if width else ()
            places[row], recent[row], lengths[row] = place, draw.recent, len(path)
            held[row] = int(draw.is_held)
            host["paths"][row * width : row * width + len(path)] = _ints(path)
        host["places"][:] = _ints(places)
        host["recent"][:] = _ints(recent)
        host["path_lengths"][:] = _ints(lengths)
        host["chained"][:] = _ints([0] * rows)
        host["held"][:] = _ints(held)
        host["num_new"][0] = len(added)
        host["new_places"][: len(added)] = _ints([place for place, _ in added])
        host["new_tokens"][: len(added)] = _ints([token for _, token in added])

    def deepen(self, source: int) -> None:
        """Fills in the other side's, one token further: the one that the step before was given."""
        np.copyto(self._blocks[self._side].numpy(), self._blocks[source].numpy())
        arrays = self._arrays[self._side]
        arrays["chained"] += 1
        arrays["num_new"][0] = 0


def _spans(sizes: dict[str, int]) -> tuple[dict[str, slice], int]:
    """Where each part of a block lies, and how long the block is."""
    ends = [0, *accumulate(sizes.values())]
    spans = {name: slice(a, b) for name, (a, b) in zip(sizes, pairwise(ends), strict=True)}
    return spans, ends[-1]


def _replacing(draws: Sequence[Draw | None], before: int) -> list[Draw]:
    """What rows are told that take the place of so many before, some of which may be left over."""
    told = [draw or _NO_DRAW for draw in draws]
    return told + [_NO_DRAW] * (before - len(told))


def _log(min_p: float) -> float:
    return float(np.log(min_p)) if min_p > 0 else -np.inf


def _ints(values: Sequence[int]) -> "array[int]":
    return array("i", values)
