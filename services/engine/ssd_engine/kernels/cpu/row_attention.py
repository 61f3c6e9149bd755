"""Attention of rows over a paged cache on a CPU: see attention.c."""

import ctypes
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.kernels.cpu.library import load_best, torch_threads


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one forward, as the kernel takes them."""

    units: NDArray[np.int64]  # [units, 5]: first row, rows, table, branches, slots of each branch
    blocks: NDArray[np.int32]  # tables, one after another
    visible: NDArray[np.int32]  # [rows]: positions of its sequence that a row sees
    branches: NDArray[np.int32]  # slots that it sees after these

    @property
    def num_seen(self) -> int:
        return int(self.visible.sum()) + len(self.branches)


class RowAttentionKernel:
    """The compiled attention, by one set of instructions."""

    def __init__(self, library: ctypes.CDLL, instructions: str) -> None:
        library.attention_set.restype = ctypes.c_void_p
        library.attention_set.argtypes = [ctypes.c_char_p]
        found = library.attention_set(instructions.encode())
        if found is None:
            raise ValueError(f"{instructions}: this processor does not have it")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.attend_rows.argtypes = [
            *[pointer] * 2,
            ctypes.c_uint,
            *[pointer] * 5,
            size,
            *[pointer] * 3,
            *[size] * 4,
            ctypes.c_float,
            size,
        ]
        self.instructions = instructions
        self._library, self._set, self._parallel = library, found, torch_threads()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: AttentionRows) -> Tensor:
        """query [rows, heads, dim] over pages [blocks, block_size, kv_heads, dim], all float32:
        [rows, heads * dim]."""
        query = query.contiguous()
        _, block_size, kv_heads, dim = key.shape
        out = torch.empty_like(query)
        failed = self._library.attend_rows(
            self._set,
            self._parallel,
            torch.get_num_threads(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            rows.units.ctypes.data,
            len(rows.units),
            rows.blocks.ctypes.data,
            rows.visible.ctypes.data,
            rows.branches.ctypes.data,
            query.shape[1],
            kv_heads,
            dim,
            block_size,
            1 / math.sqrt(dim),
            rows.num_seen,
        )
        if failed:
            raise MemoryError(f"no memory for the scores of {len(query)} rows")
        return out.flatten(1)


@functools.cache
def load_row_attention(instructions: str | None = None) -> RowAttentionKernel | None:
    """As panels.load_kernel."""
    return load_best(RowAttentionKernel, instructions)
