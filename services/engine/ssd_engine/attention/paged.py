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
MOST_LANES = 128  # rows of a tree times heads of a group: more do not fit into shared memory


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a run that are computed together."""

    run: Run
    first: int  # row of the forward
    limits: Sequence[int]  # the last position that each row sees
    branches: range

    @property
    def num_rows(self) -> int:
        return len(self.limits)


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
        pieces = [
            piece for run, row in zip(runs, starts, strict=False) for piece in self._cut(run, row)
        ]
        trees = [run for run in runs if isinstance(run, TreeRun)]
        most_scratch = max((len(run.scratch) for run in trees), default=0)
        width = max(-(-max(piece.limits) // self.block_size) + 1 for piece in pieces)
        tables = np.zeros((len(pieces), width), dtype=np.int32)
        scratch = np.zeros((len(pieces), max(1, most_scratch)), dtype=np.int32)
        for i, piece in enumerate(pieces):
            used = max(piece.limits) // self.block_size + 1
            tables[i, :used] = piece.run.blocks[:used]
            if isinstance(piece.run, TreeRun):
                scratch[i, : len(piece.run.scratch)] = piece.run.scratch
        return _Plan(
            begin=self._upload([piece.first for piece in pieces]),
            rows=self._upload([piece.num_rows for piece in pieces]),
            end=self._upload([max(piece.limits) + 1 for piece in pieces]),
            limits=self._upload([limit for piece in pieces for limit in piece.limits]),
            tables=self._upload(tables),
            branches=self._upload([branch for piece in pieces for branch in piece.branches]),
            num_branches=self._upload([piece.run.length for piece in pieces]),
            depths=self._upload([_depths(piece.run) for piece in pieces]),
            scratch=self._upload(scratch),
            most_rows=max(piece.num_rows for piece in pieces),
            division=Division.of(self.max_positions, most_scratch),
            is_tree=bool(trees),
        )

    def _cut(self, run: Run, first: int) -> list[_Piece]:
        if isinstance(run, TreeRun):
            at_once = max(1, MOST_LANES * self.num_kv_heads // self.num_heads)
            limits = run.limits
        else:
            at_once, limits = ROWS_AT_ONCE, range(run.context - run.length, run.context)
        rows = range(run.length)
        return [
            _Piece(
                run, first + begin, limits[begin : begin + at_once], rows[begin : begin + at_once]
            )
            for begin in range(0, run.length, at_once)
        ]

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


def _depths(run: QueryRun | TreeRun) -> int:
    return len(run.scratch) // run.length if isinstance(run, TreeRun) else 0
