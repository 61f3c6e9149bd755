"""Products in Triton against torch: interpreted where there is no CUDA device."""

import pytest
import torch
from torch import Tensor

from ssd_engine.kernels.kernel_set import INTERPRETED, KernelSet
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import make_product
from ssd_engine.kernels.products.triton_kernels import multiply, triton_linear
from tests.engine.kernels.products.product_oracle import EPS, product_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter knows no bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TRITON = KernelSet(hopper=False, blas=False, overlap=False)


def randn(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes) + seed)
    return torch.randn(sizes, generator=generator).to(DEVICE, DTYPE)


@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [(128, 256, 1), (72, 192, 1), (128, 512, 2), (40, 640, 3)],
    ids=["even", "odd", "parts", "odd-parts"],
)
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_a_product_is_that_of_torch(n: int, k: int, parts: int, rows: int) -> None:
    x, weight, bias, before = randn(rows, k), randn(n, k, seed=1), randn(n), randn(rows, n, seed=2)
    expected = x.float() @ weight.float().T + bias.float() + before.float()
    out = before.clone()
    multiply(x, weight, bias, out, add=True, parts=parts)
    assert float((out.float() - expected).norm() / expected.norm()) < 4e-3
    wide = torch.empty(rows, n, device=DEVICE)
    multiply(x, weight, None, wide, add=False, parts=parts)
    expected = x.float() @ weight.float().T
    assert float((wide - expected).norm() / expected.norm()) < 1e-5


def test_a_row_has_the_same_bits_at_other_places_and_row_counts() -> None:
    n, k, parts = 96, 640, 3  # parts of 256, 256 and 128
    # Beyond 64 rows tiles are larger, which the interpreter's BLAS adds up in another order.
    most = 70 if DEVICE.type == "cuda" else 60
    x, weight = randn(most, k), randn(n, k, seed=1)

    def product(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), n, dtype=DTYPE, device=DEVICE)
        multiply(rows, weight, None, out, add=False, parts=parts)
        return out

    together = product(x)
    for some in ([3], [3, 9], [most - 1, 1, 3], list(range(most - 4))):
        assert torch.equal(product(x[some]), together[some])


@pytest.mark.parametrize(
    "shape",
    [
        ProductShape(128, 256, 5, norm=True, bias=True),
        ProductShape(128, 256, 5, norm=True, gated=True),
        ProductShape(64, 512, 5, residual=True),
        ProductShape(192, 256, 5, norm=True, wide=True),
    ],
    ids=["norm", "gated", "residual", "wide"],
)
@pytest.mark.parametrize("kernels", [TRITON, INTERPRETED], ids=["triton", "blas"])
def test_what_is_fused_elsewhere_is_composed(shape: ProductShape, kernels: KernelSet) -> None:
    product = make_product(shape, DTYPE, DEVICE, kernels)
    w, x, norm = randn(shape.n, shape.k) / 16, randn(8, shape.k, seed=1), randn(shape.k)
    bias = randn(shape.n, seed=3) if shape.bias else None
    width = shape.n // 2 if shape.gated else shape.n
    before = randn(8, width, seed=2)
    out = before.float() if shape.wide else before.clone()
    product(w, x, out, norm if shape.norm else None, EPS, bias)
    expected = product_of(shape, w, x, before, norm)[: shape.rows]
    if bias is not None:
        expected += bias.float()
    assert float((out[: shape.rows].float() - expected).norm() / expected.norm()) < 8e-3
    assert torch.equal(out[shape.rows :].to(before.dtype), before[shape.rows :])


def test_a_prefill_of_many_rows_is_that_of_torch() -> None:
    x, weight, bias = randn(130, 128), randn(192, 128, seed=1), randn(192)
    expected = x.float() @ weight.float().T + bias.float()
    got = triton_linear(x, weight, bias).float()
    assert float((got - expected).norm() / expected.norm()) < 4e-3
