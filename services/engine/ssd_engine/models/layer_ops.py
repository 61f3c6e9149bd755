"""What a layer computes between its matrix products: in torch, or fused for a CUDA device."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.norm import Norm
from ssd_engine.models.rope import RopeTable, rotate


class LayerOps(Protocol):
    def places(self, positions: Tensor) -> Any:
        """What every layer of a forward over rows at ``positions`` needs."""

    def square_sums(self, projected: Tensor) -> Tensor:
        """[rows, 2] float32: of the queries' entries, and of the keys'."""

    def scale_qk(
        self, projected: Tensor, norm: Tensor, sums: Tensor, widths: tuple[int, int], eps: float
    ) -> None:
        """Normalises queries and keys in their place; ``widths``: the entries in their sums."""

    def rotate_and_write(
        self,
        qkv: Tensor,  # [rows, heads + 2 kv_heads, head_dim]
        qk_norm: Tensor | None,  # [heads + kv_heads, head_dim]
        cache: LayerCache,
        slots: Tensor,  # [rows]
        places: Any,
    ) -> Tensor:
        """The queries [rows, heads, head_dim], rotated; keys and values go to their slots."""

    def gate(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of x [rows, 2 ff]."""


class TorchOps:
    def __init__(self, rope: RopeTable, qk_norm: Norm, heads: int, kv_heads: int) -> None:
        self._rope, self._norm = rope, qk_norm
        self._heads, self._kv_heads = heads, kv_heads

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope.at(positions)

    def square_sums(self, projected: Tensor) -> Tensor:
        return torch.stack([x.float().square().sum(-1) for x in self._qk(projected)], -1)

    def scale_qk(
        self, projected: Tensor, norm: Tensor, sums: Tensor, widths: tuple[int, int], eps: float
    ) -> None:
        query, key = self._qk(projected)
        weights = norm.split((query.shape[1], key.shape[1]))
        for i, x in enumerate((query, key)):
            scale = torch.rsqrt(sums[:, i, None] / widths[i] + eps)
            x.copy_(x.float() * scale * weights[i])

    def _qk(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        dim = projected.shape[1] // (self._heads + 2 * self._kv_heads)
        query, key = self._heads * dim, self._kv_heads * dim
        return projected[:, :query], projected[:, query : query + key]

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
