"""What a layer computes between its matrix products: in torch, or fused for a CUDA device."""

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.norm import Norm
from ssd_engine.models.rope import RopeTable, rotate


class LayerOps(Protocol):
    def places(self, positions: Tensor) -> Any:
        """What every layer of a forward over rows at ``positions`` needs."""
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,  # [rows, heads + 2 kv_heads, head_dim]
        qk_norm: Tensor | None,  # [heads + kv_heads, head_dim]
        cache: LayerCache,
        slots: Tensor,  # [rows]
        places: Any,
    ) -> Tensor:
        """The queries [rows, heads, head_dim], rotated; keys and values go to their slots."""
        ...

    def gate(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of x [rows, 2 ff]."""
        ...


class TorchOps:
    def __init__(self, rope: RopeTable, qk_norm: Norm, heads: int, kv_heads: int) -> None:
        self._rope, self._norm = rope, qk_norm
        self._heads, self._kv_heads = heads, kv_heads

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope.at(positions)

    def rotate_and_write(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        cache: LayerCache,
        slots: Tensor,
        places: tuple[Tensor, Tensor],
    ) -> Tensor:
        turned = self._heads + self._kv_heads
        qk, value = qkv[:, :turned], qkv[:, turned:]
        if qk_norm is not None:
            qk = self._norm(qk, None) * qk_norm
        qk = rotate(qk, *places)
        cache.write(slots, qk[:, self._heads :], value)
        return qk[:, : self._heads]

    def gate(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
