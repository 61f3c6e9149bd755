"""KV blocks of sequences that do not run, in the host's memory."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ssd_engine.errors import ConfigError
from ssd_engine.kvcache.cache import KVCache
from ssd_engine.kvcache.swap import Swap

AT_A_TIME = 256  # blocks: a device has little room beside its cache
TIMED_BLOCKS, TIMED_ROUNDS = 256, 3


class HostCopies:
    """Copies KV blocks to the host's memory and back. Copies are ordered like the forwards of the
    device: one that is launched later finds them done."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._memory = torch.empty(0)  # [layers * 2, places, block_size, kv_heads, head_dim]

    def allocate(self, num_places: int) -> None:
        """Allocates all of it at once: later there is no memory that could be missing."""
        pool = self._kv.pool
        shape, pinned = (pool.shape[0], num_places, *pool.shape[2:]), pool.device.type == "cuda"
        try:
            self._memory = torch.zeros(shape, dtype=pool.dtype, pin_memory=pinned)
        except RuntimeError as error:
            size = num_places * self._kv.spec.bytes_per_block / 2**30
            raise ConfigError(
                f"--swap-gib: {size:.1f} GiB of the host's memory cannot be had: {error}"
            ) from None

    @torch.inference_mode()
    def apply(self, swap: Swap) -> None:
        place = swap.place
        for blocks in _pieces(swap.blocks):
            end, at = place + len(blocks), self._upload(blocks)
            for plane, memory in zip(self._kv.pool, self._memory, strict=True):
                if swap.out:
                    memory[place:end].copy_(plane.index_select(0, at), non_blocking=True)
                else:
                    plane.index_copy_(0, at, memory[place:end].to(plane.device, non_blocking=True))
            place = end

    def _upload(self, blocks: Sequence[int]) -> Tensor:
        numbers = torch.tensor(blocks, dtype=torch.int64)
        if self._kv.pool.device.type != "cuda":
            return numbers
        return numbers.pin_memory().to(self._kv.pool.device, non_blocking=True)

    def seconds_of_a_block(self) -> float:
        """Seconds out and in, measured over blocks that nobody has written to yet."""
        blocks = range(min(TIMED_BLOCKS, self._kv.pool.shape[1], self._memory.shape[1]))
        seconds = []
        for _ in range(TIMED_ROUNDS):
            begin = time.perf_counter()
            self.apply(Swap(True, 0, blocks))
            self.apply(Swap(False, 0, blocks))
            if self._kv.pool.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds) / len(blocks)


def _pieces(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(blocks), AT_A_TIME):
        yield blocks[begin : begin + AT_A_TIME]
