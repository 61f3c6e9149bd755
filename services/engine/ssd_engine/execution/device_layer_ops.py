"""One kernel for all that lies between two matrix products of a layer."""

import torch
from torch import Tensor

from ssd_engine.kernels.paged_attention import rotate_and_write_kernel
from ssd_engine.kernels.products.products import gate
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.rope import RopeTable


class FusedOps:
    def __init__(self, rope: RopeTable, qk_norm_eps: float, heads: int, kv_heads: int) -> None:
        self._rope, self._eps = rope, qk_norm_eps
        self._heads, self._kv_heads = heads, kv_heads

    def places(self, positions: Tensor) -> Tensor:
        return positions.to(torch.int32)

    def rotate_and_write(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        cache: LayerCache,
        slots: Tensor,
        places: Tensor,
    ) -> Tensor:
        rows, _, dim = qkv.shape
        query = torch.empty(rows, self._heads, dim, dtype=qkv.dtype, device=qkv.device)
        rotate_and_write_kernel[(rows, self._heads + 2 * self._kv_heads)](
            qkv,
            qk_norm if qk_norm is not None else qkv,
            self._rope.cos,
            self._rope.sin,
            places,
            slots,
            query,
            cache.key,
            cache.value,
            self._eps,
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            DIM=dim,
            NORM=qk_norm is not None,
            OVERLAP=False,
            num_warps=1,
        )
        return query

    def gate(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        gate(x, out)
        return out
