"""The sum of what ranks have, always in one order.

A collective adds up in an order that follows from where a number lies in what is summed. With more
than two ranks a row's bits would then depend on its place among other rows.
"""

import torch
from torch import Tensor

PIECE = 1024  # entries that a program adds up


def ordered_sum(parts: Tensor) -> Tensor:
    """``parts`` [ranks, ...], from the first to the last, in float32 at least, rounded once."""
    if parts.is_cuda and parts.dtype != torch.float64:
        return _on_device(parts)
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _on_device(parts: Tensor) -> Tensor:
    import triton

    from ssd_engine.kernels.elementwise import ordered_sum_kernel

    out = torch.empty_like(parts[0])
    count = out.numel()
    ordered_sum_kernel[(triton.cdiv(count, PIECE),)](
        parts.contiguous(), out, count, RANKS=len(parts), PIECE=PIECE
    )
    return out
