"""Rows of a stream: the key they travel under, and the tensors that hold them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_engine.tensor_plane.protocol.streams import RowsStream

MakeRows = Callable[[], Tensor]  # [n, width], on the host or the engine's device
_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class RowsKey:
    """Names the rows of a sequence's round."""

    sequence: int
    round: int

    def __post_init__(self) -> None:
        if not 0 <= self.sequence <= _MAX_UINT64:
            raise ValueError(f"sequence {self.sequence} is not a 64-bit number")
        if not 0 <= self.round <= _MAX_UINT32:
            raise ValueError(f"round {self.round} is not a 32-bit number")


def dtype_of(stream: RowsStream) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stream.dtype)
    return dtype


def empty_rows(stream: RowsStream, num_rows: int, device: torch.device | None = None) -> Tensor:
    """[num_rows, width]"""
    return torch.empty(num_rows, stream.width, dtype=dtype_of(stream), device=device)


def check_rows(stream: RowsStream, rows: Tensor) -> None:
    if rows.dim() != 2 or rows.shape[1] != stream.width or rows.dtype != dtype_of(stream):
        raise ValueError(
            f"rows are {tuple(rows.shape)} of {rows.dtype}; "
            f"[n, {stream.width}] of {stream.dtype} was agreed"
        )
    stream.check_count(rows.shape[0])


def memory_of(rows: Tensor) -> memoryview:
    """The bytes of contiguous rows in host memory."""
    return rows.view(-1).view(torch.uint8).numpy().data
