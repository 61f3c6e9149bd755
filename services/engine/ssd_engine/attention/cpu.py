"""Attention on a CPU by a kernel of our own, in which a row has the same bits in any company."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ssd_engine.attention.base import Run, TreeRun
from ssd_engine.kernels.cpu.row_attention import (
    AttentionRows,
    RowAttentionKernel,
    load_row_attention,
)
from ssd_engine.kvcache.cache import LayerCache

MOST_QUERIES = 32  # of a unit of work: what shares keys while they are in a cache


def choose_row_attention(
    kernels: str, dtype: torch.dtype, device: torch.device
) -> RowAttentionKernel | None:
    """None where torch's attention has to do, as its products have to: see choose_panels."""
    if device.type != "cpu" or kernels == "torch" or dtype != torch.float32:
        return None
    return load_row_attention()


class CpuBackend:
    def __init__(self, kernel: RowAttentionKernel, num_heads: int, num_kv_heads: int) -> None:
        self.dummy_block = 0
        self._kernel = kernel
        self._most_rows = max(1, MOST_QUERIES * num_kv_heads // num_heads)

    def plan(self, runs: Sequence[Run]) -> AttentionRows:
        units, branches, visible = list[tuple[int, ...]](), list[int](), list[int]()
        table = 0
        for run in runs:
            first, length, most = len(visible), run.length, 0
            if isinstance(run, TreeRun):
                visible += [limit + 1 for limit in run.limits]
                most = len(run.scratch) // length
            else:
                visible += range(run.context - length + 1, run.context + 1)
            for row in range(0, length, self._most_rows):
                rows = min(self._most_rows, length - row)
                units.append((first + row, rows, table, len(branches) + row * most, most))
            if isinstance(run, TreeRun):
                branches += chain(*(run.scratch[row::length] for row in range(length)))
            table += len(run.blocks)
        return AttentionRows(
            np.array(units, np.int64).reshape(-1, 5),
            np.fromiter(chain(*(run.blocks for run in runs)), np.int32, table),
            np.array(visible, np.int32),
            np.array(branches, np.int32),
        )

    def attend(self, query: Tensor, cache: LayerCache, plan: AttentionRows) -> Tensor:
        return self._kernel.attend(query, cache.key, cache.value, plan)
