"""Products of a few rows against torch, on a device and on parts of it. Runs on a CUDA device."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import Product, _Balanced, _Resident, _Split
from tests.engine.kernels.products.product_oracle import EPS, product_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
MOST = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1
PROCESSORS = (18, 92, MOST)


def check(make: "type[_Resident | _Split | _Balanced]", shape: ProductShape, parts: int) -> None:
    generator = torch.Generator("cuda").manual_seed(shape.n + shape.k + shape.rows)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").bfloat16()

    product: Product = make(shape, parts, CUDA)
    padded, width = shape.octets * 8, shape.n // 2 if shape.gated else shape.n
    w, x, norm = randn(shape.n, shape.k) / 30, randn(padded, shape.k), randn(shape.k)
    before = randn(padded, width)
    expected = product_of(shape, w, x, before, norm)[: shape.rows]
    results = []
    for _ in range(3):  # what one run leaves behind must not be seen by the next
        out = before.clone()
        product(w, x, out, norm if shape.norm else None, EPS)
        results.append(out)
    got = results[0][: shape.rows].float()
    assert float((got - expected).norm() / expected.norm()) < 6e-3
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert torch.equal(results[0][shape.rows :], before[shape.rows :])
    other = randn(padded, shape.k)
    other[3] = x[3]
    out = before.clone()
    product(w, other, out, norm if shape.norm else None, EPS)
    if shape.rows > 3:
        assert torch.equal(out[3], results[0][3])  # whatever the rows beside it are


@pytest.mark.parametrize("parts", PROCESSORS)
@pytest.mark.parametrize("rows", [5, 8, 24, 32])
@pytest.mark.parametrize(("n", "k"), [(5120, 8192), (1024, 3072), (2048, 2048), (5120, 25600)])
def test_tiles_that_blocks_share_are_whole(n: int, k: int, rows: int, parts: int) -> None:
    check(_Balanced, ProductShape(n, k, rows, residual=True), parts)


@pytest.mark.parametrize("rows", [1, 8, 24])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 2048)])
def test_tiles_of_a_block_each(n: int, k: int, rows: int) -> None:
    check(_Split, ProductShape(n, k, rows, residual=True), 132)


@pytest.mark.parametrize("parts", PROCESSORS)
@pytest.mark.parametrize(
    "shape",
    [
        ProductShape(6144, 4096, 8, norm=True),
        ProductShape(51200, 5120, 8, norm=True, gated=True),
        ProductShape(16384, 2048, 24, norm=True, gated=True),
        ProductShape(4096, 1024, 24, norm=True),
    ],
)
def test_x_in_shared_memory(shape: ProductShape, parts: int) -> None:
    check(_Resident, shape, parts)
