"""Rows between the engine's device and the plane's thread.

On CUDA the thread works on a stream of its own: it waits for the rows it sends, not for the
forward that the engine has launched since, and what it receives is complete before it is shown.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Staging(Protocol):
    device: torch.device

    def mark(self) -> torch.cuda.Event | None:
        """Engine's thread: the rows handed over now are complete when this has passed."""

    def after(self, mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Plane's thread: what is done inside comes after the mark."""

    def to_host(self, rows: Tensor) -> Tensor:
        """Plane's thread, inside ``after``: contiguous rows in host memory, complete."""

    def to_device(self, rows: Tensor) -> Tensor:
        """Plane's thread: rows from host memory, complete."""

    def hand_out(self, rows: Tensor) -> Tensor:
        """Engine's thread: rows that it may use from now on."""


class HostStaging:
    device = torch.device("cpu")

    def mark(self) -> None:
        return None

    def after(self, mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        return nullcontext()

    def to_host(self, rows: Tensor) -> Tensor:
        return rows.contiguous()

    def to_device(self, rows: Tensor) -> Tensor:
        return rows

    def hand_out(self, rows: Tensor) -> Tensor:
        return rows


class CudaStaging:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if mark is not None:
            self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)

    def to_host(self, rows: Tensor) -> Tensor:
        return rows.contiguous().cpu()

    def to_device(self, rows: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            landed = rows.to(self.device)
        self._stream.synchronize()
        return landed

    def hand_out(self, rows: Tensor) -> Tensor:
        # They were allocated for the plane's stream; the engine reads them on its own.
        rows.record_stream(torch.cuda.current_stream(self.device))
        return rows


def make_staging(device: torch.device) -> Staging:
    if device.type == "cuda":
        return CudaStaging(own_gpu(device))
    return HostStaging()


def own_gpu(device: torch.device) -> torch.device:
    """A GPU by its number; without one, that on which the engine's thread computes."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", number)


def device_id(device: torch.device) -> str:
    """Equal in two processes that use one device; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(own_gpu(device)).uuid)
