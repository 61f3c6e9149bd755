"""What travels on a tensor plane: rows of a sequence's round, in an agreed format."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEND_BYTES = 1 << 30
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # their places are their wire codes
MakeRows = Callable[[], Tensor]  # [n, vocab_size], on the host or the engine's device
_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True, order=True)
class RowsKey:
    """Names rows: those of a sequence's round, from ``first_row`` on."""

    sequence: int
    round: int
    first_row: int

    def __post_init__(self) -> None:
        if not 0 <= self.sequence <= _MAX_UINT64:
            raise ValueError(f"sequence {self.sequence} is not a 64-bit number")
        if not (0 <= self.round <= _MAX_UINT32 and 0 <= self.first_row <= _MAX_UINT32):
            raise ValueError(f"round {self.round} or row {self.first_row} is not a 32-bit number")


@dataclass(frozen=True)
class RowsFormat:
    """Every row has ``vocab_size`` values of ``dtype``; one send has 1 to ``max_rows`` rows."""

    vocab_size: int
    dtype: torch.dtype
    max_rows: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"rows of {self.dtype} cannot be sent")
        if self.vocab_size < 1 or self.max_rows < 1:
            raise ValueError("rows need at least one value, sends at least one row")
        if self.max_bytes > MAX_SEND_BYTES:
            raise ValueError(f"{self.max_rows} rows of {self.row_bytes} bytes are too much to send")

    @property
    def row_bytes(self) -> int:
        return self.vocab_size * self.dtype.itemsize

    @property
    def max_bytes(self) -> int:
        return self.max_rows * self.row_bytes

    def empty(self, num_rows: int, device: torch.device | None = None) -> Tensor:
        """[num_rows, vocab_size]"""
        return torch.empty(num_rows, self.vocab_size, dtype=self.dtype, device=device)

    def check_count(self, num_rows: int) -> None:
        if not 1 <= num_rows <= self.max_rows:
            raise ValueError(f"{num_rows} rows; 1 to {self.max_rows} were agreed")

    def check(self, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.shape[1] != self.vocab_size or rows.dtype != self.dtype:
            raise ValueError(
                f"rows are {tuple(rows.shape)} of {rows.dtype}; "
                f"[n, {self.vocab_size}] of {self.dtype} was agreed"
            )
        self.check_count(rows.shape[0])


def memory_of(rows: Tensor) -> memoryview:
    """The bytes of contiguous rows in host memory."""
    return rows.view(-1).view(torch.uint8).numpy().data
