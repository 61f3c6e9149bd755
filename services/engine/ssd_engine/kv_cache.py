"""The paged KV cache: tensors only. Which page belongs to whom is the block pool's business."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    key: Tensor  # [blocks, block_size, kv_heads, head_dim]
    value: Tensor

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks that begin to be written: padding reads beyond a sequence's end, and even
        a weight of 0 would carry over what is not finite there."""
        self.key.index_fill_(0, blocks, 0)
        self.value.index_fill_(0, blocks, 0)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put rows [n, kv_heads, head_dim] at slots [n] (block * block_size + offset)."""
        self.key.view(-1, *self.key.shape[2:]).index_copy_(0, slots, key)
        self.value.view(-1, *self.value.shape[2:]).index_copy_(0, slots, value)

    def move(self, sources: Tensor, slots: Tensor) -> None:
        """Copy rows to slots that are none of the sources."""
        for cache in (self.key, self.value):
            rows = cache.view(-1, *cache.shape[2:])
            rows.index_copy_(0, slots, rows.index_select(0, sources))


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        elements = self.num_kv_heads * self.head_dim * self.block_size
        return 2 * self.num_layers * elements * self.dtype.itemsize


def allocate(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> list[LayerCache]:
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return [
        LayerCache(*(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(2)))
        for _ in range(spec.num_layers)
    ]
