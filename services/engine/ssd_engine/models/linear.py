"""Rows times a weight matrix, and rows of one, in whatever layout a device keeps it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.kernels.cpu.panels import PANEL, PackedWeight, PanelKernel, load_kernel

log = logging.getLogger(__name__)

Matrix = Any  # [out, in]: a PackedWeight on a CPU that has a kernel for it, else a Tensor
Linear = Callable[[Tensor, Matrix, Tensor | None], Tensor]  # x [n, in], weight [out, in], bias


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    out = weight.multiply(x)
    return out if bias is None else out.add_(bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, slowly: for a part of a CUDA device, where cuBLAS's products of halves are wrong
    (see kernels/kernel_set.py)."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)


def look_up(embedding: Matrix, tokens: Tensor) -> Tensor:
    """[tokens, d], in the dtype that the embedding is kept in."""
    if isinstance(embedding, PackedWeight):
        return embedding.look_up(tokens)
    return F.embedding(tokens, embedding)


def choose_panels(kernels: str, dtype: torch.dtype, device: torch.device) -> PanelKernel | None:
    """The kernel for which a CPU's weights are packed; None where they stay plain."""
    if device.type != "cpu" or kernels == "torch":
        return None
    if dtype != torch.float32:
        log.warning("%s on a CPU: weights stay plain, and products are torch's", dtype)
        return None
    kernel = load_kernel()
    if kernel is None:
        log.warning(
            "the kernel for products on a CPU was not built: weights stay plain, and products are "
            "torch's, which are slower; install the package again with a C compiler at hand"
        )
        return None
    log.info(
        "weights are kept once, in panels of %d outputs for %s; by these instructions bfloat16 %s",
        PANEL,
        kernel.instructions,
        "stays bfloat16" if kernel.keeps_bfloat16 else "is widened to float32",
    )
    return kernel
