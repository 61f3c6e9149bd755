"""One kernel for all that lies between two matrix products of a layer."""

import torch
import triton
from torch import Tensor

from ssd_engine.kernels.elementwise import scale_qk_kernel, square_sums_kernel
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

    def square_sums(self, projected: Tensor) -> Tensor:
        rows, width = projected.shape
        sums = torch.empty(rows, 2, device=projected.device)
        square_sums_kernel[(rows, 2)](projected, sums, width, *self._qk(width), num_warps=8)
        return sums

    def scale_qk(
        self, projected: Tensor, norm: Tensor, sums: Tensor, widths: tuple[int, int], eps: float
    ) -> None:
        rows, width = projected.shape
        scale_qk_kernel[(rows, 2)](
            projected, norm, sums, width, *widths, eps, *self._qk(width), num_warps=8
        )

    def _qk(self, width: int) -> tuple[int, int, int]:
        dim = width // (self._heads + 2 * self._kv_heads)
        query, key = self._heads * dim, self._kv_heads * dim
        return query, key, triton.next_power_of_2(query)

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
