"""Rows in the host's memory, or on their way there while the device computes something else."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


class HostRows:
    """Some rows [n, width], to which nobody writes."""

    def __init__(
        self, rows: Tensor, landed: torch.cuda.Event | None = None, borrowed: bool = False
    ) -> None:
        """``borrowed``: a part of memory that rows of others may share."""
        self._rows, self._landed, self.is_borrowed = rows, landed, borrowed
        self.num_bytes = rows.nbytes

    def __len__(self) -> int:
        return self._rows.shape[0]

    def get(self) -> Tensor:
        """Waits until they are there."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        return self._rows

    def part(self, begin: int, end: int) -> "HostRows":
        """Some of them, in the same memory."""
        return HostRows(self._rows[begin:end], self._landed, self.is_borrowed)

    def settled(self) -> "HostRows":
        """The same, in memory of their own."""
        return HostRows(self.get().clone()) if self.is_borrowed else self


class RowCopies(Protocol):
    def mark(self) -> torch.cuda.Event | None:
        """What the device has been asked for so far is done when this has passed."""

    def copy(self, pieces: Sequence[Tensor], mark: torch.cuda.Event | None) -> list[HostRows]:
        """Copies what is complete after the mark; what was launched since is not waited for."""


class CopiesOnHost:
    def mark(self) -> None:
        return None

    def copy(self, pieces: Sequence[Tensor], mark: torch.cuda.Event | None) -> list[HostRows]:
        return [HostRows(rows.clone()) for rows in pieces]


class CopiesFromDevice:
    """All pieces of a forward go to the host in one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, pieces: Sequence[Tensor], mark: torch.cuda.Event | None) -> list[HostRows]:
        landed = torch.cuda.Event()
        if mark is not None:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            rows = torch.cat([*pieces]) if len(pieces) > 1 else pieces[0]
            host = pinned_if_it_can_be(rows.shape, rows.dtype)
            host.copy_(rows, non_blocking=True)
            landed.record(self._stream)
        for piece in pieces:
            piece.record_stream(self._stream)
        whole = HostRows(host, landed, borrowed=True)
        ends = [*accumulate(map(len, pieces))]
        return [whole.part(end - len(piece), end) for piece, end in zip(pieces, ends, strict=True)]


def pinned_if_it_can_be(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory to which a device copies by itself. Where there is none left, the copy is waited
    for."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def host_copies(device: torch.device) -> RowCopies:
    return CopiesFromDevice(device) if device.type == "cuda" else CopiesOnHost()
