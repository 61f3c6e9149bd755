"""Products of which a row has the same bits however many rows there are.

Thread by thread on a CPU; on a CUDA device the same at the sizes of real models.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.execution.layer_products import (
    ChainedProducts,
    LayerBuffers,
    make_layer_products,
)
from ssd_engine.forward.batch import Chunk
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products import streamed_products
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.streamed_products import (
    MOST_ROWS,
    WIDTHS,
    AloneProduct,
    NormedRows,
    StreamedProduct,
    pieces_of,
    streamed_kernel,
    waves_of,
)
from ssd_engine.models.layers import PromptLayers
from tests.engine.kernels.emulated import EmulatedKernel, Emulator, emulated_map
from tests.engine.kernels.products.product_oracle import EPS, make_randn, product_of
from tests.harness import make_runner
from tests.random_models import make_model
from tests.suite.scale import full_only
from tests.suite.tools import needs_tool

CPU = torch.device("cpu")
SHARED_MEMORY = 227 * 1024
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


def kernels_for(processors: int) -> KernelSet:
    return KernelSet(True, False, False, processors, SHARED_MEMORY, steady=True)


class Operands:
    """Of one shape, for as many rows as there can be."""

    def __init__(self, shape: ProductShape, device: torch.device, rows: int) -> None:
        randn = make_randn(shape.n + shape.k, device)
        self.weight, self.x = randn(shape.n, shape.k) / 30, randn(rows, shape.k)
        self.norm = 1 + 0.2 * randn(shape.k)
        self.bias = randn(shape.n) if shape.bias else None
        self.before = randn(rows, shape.n // 2 if shape.gated else shape.n)

    def run(self, shape: ProductShape, kernels: KernelSet) -> Tensor:
        dtype = torch.float32 if shape.wide else torch.bfloat16
        out = self.before[: shape.rows + 1].to(dtype, copy=True)
        product = AloneProduct(shape, kernels, self.weight.device)
        norm = self.norm if shape.norm else None
        product(self.weight, self.x, out, norm, EPS, self.bias)
        return out

    def expected(self, shape: ProductShape) -> Tensor:
        rows = shape.rows
        x, before = self.x[:rows], self.before[:rows]
        return product_of(shape, self.weight, x, before, self.norm, self.bias)


def check_bits(
    shape: ProductShape, device: torch.device, row_counts: Sequence[int], processors: int
) -> None:
    """What a row gives, and that it gives the same among more rows; others are left as they are."""
    operands, kernels = Operands(shape, device, max(row_counts) + 1), kernels_for(processors)
    most: Tensor | None = None
    for rows in sorted(row_counts, reverse=True):
        shape = replace(shape, rows=rows)
        got, expected = operands.run(shape, kernels), operands.expected(shape)
        error = (got[:rows].float() - expected).norm() / expected.norm()
        assert float(error) < 6e-3, rows
        assert torch.equal(got[rows].bfloat16(), operands.before[rows]), rows
        most = got if most is None else most
        assert torch.equal(got[:rows], most[:rows]), rows


@pytest.fixture
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_products, "compiled_kernel", emulator)
    monkeypatch.setattr(streamed_products, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(streamed_products, "tensor_map", emulated_map)
    monkeypatch.setattr(streamed_products, "streamed_kernel", streamed_kernel.__wrapped__)


NORMED = {"norm": True, "bias": True}
GATED = {"norm": True, "gated": True, "bias": True}
ONTO = {"residual": True, "bias": True}


@interpreted
@needs_tool("g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("shape", "rows", "processors"),
    [
        (ProductShape(160, 320, 1, **GATED), (1, 9), 3),
        full_only(ProductShape(192, 192, 1, **NORMED), (2, 70), 2),
        full_only(ProductShape(192, 128, 1, **ONTO), (5, 33, 70), 1),
        full_only(ProductShape(144, 192, 1, norm=True, wide=True), (8, 30), 2),
        full_only(ProductShape(144, 72, 1), (3, 258), 2),  # in pieces
        full_only(ProductShape(128, 3328, 1, **ONTO), (3, 9), 2),  # blocks share the tile
        full_only(ProductShape(256, 4096, 1, **ONTO), (8, 70), 9),  # four of them; rows apart
        full_only(ProductShape(128, 4096, 1, **NORMED), (8, 70), 8),  # eight of them
        full_only(ProductShape(128, 4096, 1, **ONTO), (8, 70), 3),  # three of them
    ],
    ids=["gated", "normed", "onto", "wide", "pieces", "shared", "apart", "eight", "three"],
)
def test_a_row_has_the_same_bits_however_many_there_are(
    shape: ProductShape, rows: Sequence[int], processors: int
) -> None:
    check_bits(shape, CPU, rows, processors)


@interpreted
@needs_tool("g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("shape", "processors", "changed"),
    [
        (ProductShape(128, 3328, 3, residual=True), 2, {"backwards": True}),
        full_only(ProductShape(256, 4096, 70, **ONTO), 9, {"most_clusters": lambda *_: 1}),
    ],
    ids=["any order", "no room for clusters"],
)
def test_blocks_may_come_in_any_order(
    shape: ProductShape, processors: int, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operands, kernels = Operands(shape, CPU, shape.rows + 1), kernels_for(processors)
    as_ever = operands.run(shape, kernels)
    for name, value in changed.items():
        monkeypatch.setattr(EmulatedKernel, name, value)
    for _ in range(2):  # nothing is left of the run before
        assert torch.equal(operands.run(shape, kernels), as_ever)


@interpreted
@needs_tool("g++")
@pytest.mark.usefixtures("emulated")
def test_what_adds_to_hidden_states_prepares_them_for_the_next_norm() -> None:
    randn, kernels = make_randn(5, CPU), kernels_for(2)
    weight, x, hidden, norm = randn(128, 3328) / 60, randn(5, 3328), randn(5, 128), randn(128)
    added, taken = (NormedRows(5, 128, CPU) for _ in range(2))
    product = StreamedProduct(ProductShape(128, 3328, 5, residual=True), kernels, CPU)
    product.onto(weight, x, hidden, None, norm, added)
    taken.take(hidden, norm)
    torch.testing.assert_close(added.x, taken.x, atol=0, rtol=2**-7)
    for one, other in zip(added.squares, taken.squares, strict=True):
        torch.testing.assert_close(one[:, :5], other[:, :5])


@pytest.mark.full
@interpreted
@needs_tool("g++")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("family", ["llama-biases", "olmo2-biases", "qwen3", "qwen2.5"])
def test_a_prefill_by_chained_products_is_the_decoders(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    runner = make_runner(tmp_path, dtype="bfloat16")
    parts = [Chunk(list(range(3, 9)), 0, [4], 1), Chunk([5, 6], 0, [3], 1)]
    model, rows = runner.model, sum(len(part.tokens) for part in parts)
    expected = model.normalise(runner.prompt_layers(parts).forward())
    products = make_layer_products(model, rows, kernels_for(4), LayerBuffers(model, rows))
    assert isinstance(products, ChainedProducts)
    layers = PromptLayers(model, runner.kv, products, *runner.prepare(parts))
    got = model.normalise(layers.forward())
    assert float((got - expected).norm() / expected.norm()) < 0.03


def test_pieces_cover_all_rows_once() -> None:
    for rows in range(1, 3 * MOST_ROWS):
        pieces = pieces_of(rows)
        assert [row for p in pieces for row in range(p.begin, p.begin + p.rows)] == [*range(rows)]
        assert all(piece.rows <= piece.width in WIDTHS for piece in pieces)


@pytest.mark.parametrize("processors", [1, 20, 92, 114, 132])
def test_waves_cover_all_tiles_with_the_blocks_that_there_are(processors: int) -> None:
    for n in (16, 128, 896, 4096, 6144, 28672, 128256):
        for k in (64, 896, 4096, 14336):
            waves = waves_of(n, k, processors)
            assert sum(wave.tiles for wave in waves) == -(-n // 128)
            assert all(wave.split * wave.tiles <= processors for wave in waves)
            assert sum(wave.split > 1 for wave in waves) <= streamed_products.MOST_SHARED_WAVES


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("processors", [20, 92, 132])
@pytest.mark.parametrize(
    "shape",
    [
        ProductShape(6144, 4096, 1, **NORMED),
        ProductShape(4096, 4096, 1, **ONTO),
        ProductShape(9728, 896, 1, **GATED),
        ProductShape(896, 4864, 1, **ONTO),
        ProductShape(5120, 8192, 1, **ONTO),  # three blocks share a tile
        ProductShape(32000, 1024, 1, norm=True, wide=True),
        ProductShape(1152, 896, 1),
    ],
)
def test_on_a_device_too(shape: ProductShape, processors: int) -> None:
    counts = (1, 7, 8, 9, 31, 33, 64, 65, 128, 129, 200, 256, 300)
    check_bits(shape, torch.device("cuda"), counts, processors)
