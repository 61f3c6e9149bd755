"""Tensor parallelism without processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ssd_engine.models.ordered_sum import ordered_sum

Result = TypeVar("Result")


class ThreadRanks:
    """Tensor-parallel ranks that are threads of this process."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(parts)
        self._parts = parts
        self._barrier = barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x
        self._barrier.wait(timeout=60)
        parts = list(self._parts)
        self._barrier.wait(timeout=60)
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(torch.stack(self._exchange(x)))

    def gather_columns(self, x: Tensor) -> Tensor | None:
        parts = self._exchange(x)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def minimum(self, value: int) -> int:
        return value


def on_ranks(count: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """What each of so many ranks gives, the first one first."""
    parts, barrier = [torch.empty(0)] * count, threading.Barrier(count)
    ranks = [ThreadRanks(rank, parts, barrier) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, ranks))
