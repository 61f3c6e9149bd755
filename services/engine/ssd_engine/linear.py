"""Rows times a weight matrix, the fastest way for a device."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [n, in], weight [out, in], bias


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def both_layouts(weights: Iterable[Tensor]) -> Linear:
    """On a CPU, for twice the memory.

    One row is fastest with the weight as it is. For several rows BLAS packs the weight anew at
    every call, and from the transposed one it packs faster: a few rows, as a verification has,
    take 10 to 45 % less time (float32 on Arm).
    """
    turned = {id(weight): weight.t().contiguous() for weight in weights}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        other = turned.get(id(weight)) if x.shape[0] > 1 else None
        if other is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, other) if bias is None else torch.addmm(bias, x, other)

    return linear
