"""What products of few rows and attention are to give, and small parts of a decoder to try them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ssd_engine.forward.batch import TreeRows
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import Product

EPS, PAGE = 1e-5, 16
Randn = Callable[..., Tensor]


def make_randn(seed: int, device: torch.device) -> Randn:
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).bfloat16()

    return randn


def product_of(
    shape: ProductShape,
    w: Tensor,
    x: Tensor,
    before: Tensor,
    norm: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """In float32."""
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


def check_product(
    make: Callable[..., Product], shape: ProductShape, processors: int, device: torch.device
) -> Tensor:
    """Run again and again: what one run leaves behind must not be seen by the next."""
    randn = make_randn(shape.n + shape.k + shape.rows, device)
    product, rows = make(shape, processors, device), shape.rows
    padded, width = shape.octets * 8, shape.n // 2 if shape.gated else shape.n
    w, x, norm = randn(shape.n, shape.k) / 30, randn(padded, shape.k), randn(shape.k)
    before = randn(padded, width)

    def run(x: Tensor) -> Tensor:
        out = before.clone()
        product(w, x, out, norm if shape.norm else None, EPS)
        return out

    got, expected = run(x), product_of(shape, w, x, before, norm)[:rows]
    assert float((got[:rows].float() - expected).norm() / expected.norm()) < 6e-3
    assert torch.equal(got[rows:], before[rows:])
    other = randn(padded, shape.k)
    other[0] = x[0]
    assert torch.equal(run(other)[0], got[0])  # whatever the rows beside it are
    assert torch.equal(run(x), got)
    return got


def attention_model(
    dim: int, heads: int, kv_heads: int, normed: bool, room: int, device: torch.device
) -> Any:
    """As much of a decoder as attention asks for, with so many positions."""
    randn = make_randn(dim + heads, device)
    cosine, sine = randn(room, dim // 2), randn(room, dim // 2)
    norm = 1 + 0.1 * randn(heads + kv_heads, dim) if normed else None
    return SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        config=SimpleNamespace(head_dim=dim, qk_norm_eps=EPS),
        weights=SimpleNamespace(norm=randn(4), layers=[SimpleNamespace(qk_norm=norm, o=None)]),
        rope=SimpleNamespace(
            cos=torch.cat((cosine, cosine), dim=1), sin=torch.cat((-sine, sine), dim=1)
        ),
        randn=randn,
    )


def tree_after(context: int, chain: int, branches: int, depth: int, blocks: list[int]) -> TreeRows:
    """Whose scratch is in the last blocks."""
    first = blocks[-(len(blocks) // 4)] * PAGE
    scratch = list(range(first, first + branches * (depth + 1)))
    limits = [context - 1 + i % (chain + 1) for i in range(branches)]
    positions = [limit + depth + 1 for limit in limits]
    slots = scratch[-branches:]
    return TreeRows([1] * branches, positions, limits, slots, context, blocks, scratch)
