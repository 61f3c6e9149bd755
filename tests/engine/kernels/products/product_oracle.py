"""What a product of few rows is to give, in float32."""

import torch
from torch import Tensor

from ssd_engine.kernels.products.product_shape import ProductShape

EPS = 1e-5


def product_of(
    shape: ProductShape,
    w: Tensor,
    x: Tensor,
    before: Tensor,
    norm: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    x = x.float()
    if shape.norm:
        x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * norm.float()
    y = x @ w.float().T
    if bias is not None:
        y = y + bias.float()
    if shape.gated:
        first, second = y.chunk(2, dim=1)
        y = torch.nn.functional.silu(first) * second
    return y + before.float() if shape.residual else y
