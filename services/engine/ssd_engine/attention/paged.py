"""The kernel of decode, verify and tree steps, for runs of any length: all that it needs is Triton.

A long run is cut into short ones, each of which reads the keys anew; the cache of the device makes
that bearable, and FlashInfer, where it is installed, makes it unnecessary. How a run is cut changes
no bit of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton
from torch import Tensor

from ssd_engine.attention.base import QueryRun, Run, TreeRun
from ssd_engine.kernels.paged_attention import (
    Division,
    merge_parts_kernel,
    paged_attention_kernel,
)
from ssd_engine.kvcache.cache import LayerCache

ROWS_AT_ONCE = 16  # rows of a run of consecutive tokens that are computed together


@dataclass(frozen=True, slots=True)
class _Plan:
    begin: Tensor  # [runs] and so on, as the kernel takes them
    rows: Tensor
    end: Tensor
    limits: Tensor
    tables: Tensor
    branches: Tensor
    num_branches: Tensor
    depths: Tensor
    scratch: Tensor
    most_rows: int
    division: Division
    is_tree: bool


@dataclass
class PagedBackend:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_positions: int
    device: torch.device
    dummy_block: int = 0

    def plan(self, runs: Sequence[Run]) -> _Plan:
        starts = accumulate((run.length for run in runs), initial=0)
        pieces = [piece for run, row in zip(runs, starts, strict=False) for piece in _cut(run, row)]
        trees = [run for run in runs if isinstance(run, TreeRun)]
        most_scratch = max((len(run.scratch) for run in trees), default=0)
        width = max(-(-max(limits) // self.block_size) + 1 for _, _, _, limits in pieces)
        tables = np.zeros((len(pieces), width), dtype=np.int32)
        scratch = np.zeros((len(pieces), max(1, most_scratch)), dtype=np.int32)
        for i, (run, _, _, limits) in enumerate(pieces):
            used = max(limits) // self.block_size + 1
            tables[i, :used] = run.blocks[:used]
            if isinstance(run, TreeRun):
                scratch[i, : len(run.scratch)] = run.scratch
        return _Plan(
            begin=self._upload([first for _, first, _, _ in pieces]),
            rows=self._upload([rows for _, _, rows, _ in pieces]),
            end=self._upload([max(limits) + 1 for _, _, _, limits in pieces]),
            limits=self._upload([limit for _, _, _, limits in pieces for limit in limits]),
            tables=self._upload(tables),
            branches=self._upload([i for _, _, rows, _ in pieces for i in range(rows)]),
            num_branches=self._upload([rows for _, _, rows, _ in pieces]),
            depths=self._upload([_depths(run) for run, *_ in pieces]),
            scratch=self._upload(scratch),
            most_rows=max(rows for _, _, rows, _ in pieces),
            division=Division.of(self.max_positions, most_scratch),
            is_tree=bool(trees),
        )

    def attend(self, query: Tensor, cache: LayerCache, plan: _Plan) -> Tensor:
        query = query.contiguous()
        out = torch.zeros_like(query)
        runs, group = plan.begin.shape[0], self.num_heads // self.num_kv_heads
        lanes = max(16, triton.next_power_of_2(plan.most_rows * group))
        parts = plan.division.most_parts
        pairs = runs * self.num_kv_heads * parts * lanes
        partial = query.new_empty(pairs * self.head_dim, dtype=torch.float32)
        peaks = query.new_empty(pairs * 2, dtype=torch.float32)
        about = {
            "HEADS": self.num_heads,
            "KV_HEADS": self.num_kv_heads,
            "DIM": self.head_dim,
            "ROWS": lanes,
            **plan.division.constants(),
            "TREE": plan.is_tree,
            "OVERLAP": False,
        }
        paged_attention_kernel[(parts, self.num_kv_heads, runs)](
            query,
            cache.key,
            cache.value,
            out,
            plan.begin,
            plan.rows,
            plan.end,
            plan.limits,
            plan.tables,
            plan.branches,
            plan.num_branches,
            plan.depths,
            plan.scratch,
            partial,
            peaks,
            math.log2(math.e) / math.sqrt(self.head_dim),
            plan.tables.shape[1],
            plan.scratch.shape[1],
            BLOCK=self.block_size,
            **about,
        )
        merge_parts_kernel[(plan.most_rows * group, self.num_kv_heads, runs)](
            partial,
            peaks,
            out,
            plan.begin,
            plan.rows,
            plan.end,
            plan.num_branches,
            plan.depths,
            AT_ONCE=8,
            num_warps=1,
            **about,
        )
        return out.view(query.shape[0], -1)

    def _upload(self, values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(
            self.device, non_blocking=True
        )


def _cut(run: Run, first: int) -> list[tuple[Run, int, int, list[int]]]:
    """Pieces of a run: the run, the first row, how many rows, and their limits."""
    if isinstance(run, TreeRun):
        return [(run, first, run.length, list(run.limits))]
    pieces: list[tuple[Run, int, int, list[int]]] = []
    for begin in range(0, run.length, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, run.length - begin)
        lowest = run.context - run.length + begin
        pieces.append((run, first + begin, rows, list(range(lowest, lowest + rows))))
    return pieces


def _depths(run: QueryRun | TreeRun) -> int:
    return len(run.scratch) // run.length if isinstance(run, TreeRun) else 0
