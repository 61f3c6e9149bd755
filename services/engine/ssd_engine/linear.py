"""Rows times a weight matrix, the fastest way for a device."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.few_rows import MOST_ROWS, Kernel, load_kernel, multiply, pack

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [n, in], weight [out, in], bias


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, slowly: for a part of a CUDA device, where cuBLAS's products of halves are wrong
    (see cuda/kernel_set.py)."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def second_layout(weights: Iterable[Tensor]) -> Linear:
    """For float32 on a CPU, for twice the memory.

    One row, and many, are fastest with the weight as it is. For a few rows, as a verification or a
    step of a tree has, BLAS packs the weight anew at every call.
    """
    kernel = load_kernel() if torch.get_num_threads() == 1 else None
    return transposed(weights) if kernel is None else packed(weights, kernel)


def packed(weights: Iterable[Tensor], kernel: Kernel) -> Linear:
    """A few rows take half the time, on one core."""
    layouts = {id(weight): pack(weight) for weight in weights}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout = layouts.get(id(weight)) if 1 < x.shape[0] <= MOST_ROWS else None
        if layout is None:
            return F.linear(x, weight, bias)
        out = multiply(kernel, x, layout, weight.shape[0])
        return out if bias is None else out.add_(bias)

    return linear


def transposed(weights: Iterable[Tensor]) -> Linear:
    """From the transposed weight BLAS packs faster: a few rows take 10 to 45 % less time."""
    layouts = {id(weight): weight.t().contiguous() for weight in weights}

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout = layouts.get(id(weight)) if x.shape[0] > 1 else None
        if layout is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, layout) if bias is None else torch.addmm(bias, x, layout)

    return linear
