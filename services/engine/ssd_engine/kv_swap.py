"""KV blocks of sequences that do not run, in the host's memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ssd_engine.kv_cache import KVCache

TIMED_BLOCKS, TIMED_ROUNDS = 8, 3


class SwapKind(IntEnum):
    OUT = 0  # blocks are copied to the host
    IN = 1  # and back, into others; the copy is dropped
    DROP = 2


@dataclass(frozen=True, slots=True)
class Swap:
    kind: SwapKind
    key: int  # of the copy
    first: int = 0  # IN: of the copied blocks, the first that is brought back
    blocks: Sequence[int] = ()

    def encode(self) -> list[int]:
        return [self.kind, self.key, self.first, *self.blocks]

    @classmethod
    def decode(cls, values: Sequence[int]) -> "Swap":
        kind, key, first, *blocks = values
        return cls(SwapKind(kind), key, first, blocks)


class HostCopies:
    """Copies are ordered like the forwards of the device: who launches later finds them done."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._copies: dict[int, Tensor] = {}  # [layers * 2, blocks, block_size, kv_heads, head_dim]

    @torch.inference_mode()
    def apply(self, swap: Swap) -> None:
        if swap.kind is SwapKind.OUT:
            self._copies[swap.key] = self._copy_out(swap.blocks)
            return
        copy = self._copies.pop(swap.key)
        if swap.kind is SwapKind.IN:
            self._copy_in(copy[:, swap.first : swap.first + len(swap.blocks)], swap.blocks)

    def _copy_out(self, blocks: Sequence[int]) -> Tensor:
        """Layer by layer: a device has no room for all of it once more."""
        pool, at = self._kv.pool, self._places(blocks)
        pinned = pool.device.type == "cuda"
        shape = (pool.shape[0], len(blocks), *pool.shape[2:])
        copy = torch.empty(shape, dtype=pool.dtype, pin_memory=pinned)
        for to, plane in zip(copy, pool, strict=True):
            to.copy_(plane.index_select(0, at), non_blocking=True)
        return copy

    def _copy_in(self, copy: Tensor, blocks: Sequence[int]) -> None:
        pool, at = self._kv.pool, self._places(blocks)
        for plane, source in zip(pool, copy, strict=True):
            plane.index_copy_(0, at, source.to(pool.device, non_blocking=True))

    def _places(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._kv.pool.device)

    def seconds_of_a_block(self) -> float:
        """Out and in, measured over blocks that nobody has written to yet."""
        blocks = range(min(TIMED_BLOCKS, self._kv.pool.shape[1]))
        seconds = []
        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self.apply(Swap(SwapKind.OUT, 0, 0, blocks))
            self.apply(Swap(SwapKind.IN, 0, 0, blocks))
            if self._kv.pool.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds) / len(blocks)
