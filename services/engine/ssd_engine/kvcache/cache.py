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
    num_kv_heads: int  # heads of this rank
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        elements = self.num_kv_heads * self.head_dim * self.block_size
        return 2 * self.num_layers * elements * self.dtype.itemsize


class KVCache:
    """The keys and values of all layers, in one tensor; empty until it is known how much fits."""

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self.layers: list[LayerCache] = []
        self.pool = torch.empty(0)  # [layers * 2, blocks, block_size, kv_heads, head_dim]

    def allocate(self, num_blocks: int) -> None:
        spec = self.spec
        self.layers.clear()
        self.pool = torch.empty(0)
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.pool = torch.zeros(
            (2 * spec.num_layers, *shape), dtype=spec.dtype, device=self._device
        )
        self.layers += [LayerCache(*pair) for pair in self.pool.view(spec.num_layers, 2, *shape)]
