"""Products of a few rows against torch, and a step's attention. Runs on a CUDA device."""

from typing import Any

import pytest
import torch

from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.step_attention import (
    ClusterAttention,
    ClusterShape,
    TritonAttention,
    largest_cluster,
)
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import _Balanced, _Resident, _Split
from ssd_engine.kvcache.cache import LayerCache
from tests.engine.kernels.products.product_oracle import attention_model, check_product, tree_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
MOST = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1
# Tiles that blocks share, tiles of a block each, and x in shared memory.
PRODUCTS: list[tuple[type, ProductShape, int]] = [
    *(
        (_Balanced, ProductShape(n, k, rows, residual=True), processors)
        for n, k in ((5120, 8192), (1024, 3072), (2048, 2048), (5120, 25600))
        for rows in (5, 8, 24, 32)
        for processors in (18, 92, MOST)
    ),
    *(
        (_Split, ProductShape(n, k, rows, residual=True), 132)
        for n, k in ((4096, 4096), (1024, 2048))
        for rows in (1, 8, 24)
    ),
    *(
        (_Resident, shape, processors)
        for shape in (
            ProductShape(6144, 4096, 8, norm=True),
            ProductShape(51200, 5120, 8, norm=True, gated=True),
            ProductShape(16384, 2048, 24, norm=True, gated=True),
            ProductShape(4096, 1024, 24, norm=True),
        )
        for processors in (18, 92, MOST)
    ),
]


@pytest.mark.parametrize(("kind", "shape", "processors"), PRODUCTS)
def test_products_are_those_of_torch(kind: Any, shape: ProductShape, processors: int) -> None:
    check_product(kind, shape, processors, CUDA)


# All of a step's attention in one kernel, against the three of Triton


ROOM = 1600  # positions of a sequence
DUMMY = 4 * ROOM


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "normed"),
    [(128, 16, 4, False), (128, 16, 8, True), (64, 32, 8, False), (128, 64, 8, True)],
)
@pytest.mark.parametrize(("context", "processors"), [(1, 132), (61, 132), (250, 20), (1000, 999)])
def test_attention_in_one_kernel_is_that_of_three(
    dim: int, heads: int, kv_heads: int, normed: bool, context: int, processors: int
) -> None:
    model = attention_model(dim, heads, kv_heads, normed, ROOM, torch.device("cuda"))
    group = heads // kv_heads
    blocks = [list(range(i * ROOM // 16, (i + 1) * ROOM // 16)) for i in range(4)]
    branches = min(24, 128 // group)
    parts: list[list[Part]] = [
        [Chunk([1] * 8, context, blocks[0], 8), Chunk([1], 3 * context // 4, blocks[1], 1)],
        [
            Chunk([1] * 5, context, blocks[0], 5),
            tree_after(context, 5, branches, 0, blocks[0]),
            tree_after(context, 0, 3, 4, blocks[2]),
        ],
        [tree_after(context, 2, branches, 5, blocks[3])],
    ]
    for step in parts:
        shape = StepShape(64, 4, branches, ROOM, 16, scratch=branches * 8)
        inputs = StepInputs(shape, torch.device("cuda"))
        inputs.clear(DUMMY)
        runs, _ = step_runs(step, [None] * sum(part.num_logits for part in step), 16)
        inputs.fill(runs, DUMMY)
        inputs.copy()
        projected = model.randn(shape.padded_rows, (heads + 2 * kv_heads) * dim)
        cache = [model.randn(4 * ROOM // 16 + 1, 16, kv_heads, dim) for _ in range(2)]
        mine, theirs = (LayerCache(cache[0].clone(), cache[1].clone()) for _ in range(2))
        cluster = largest_cluster(model, shape, processors)
        three = TritonAttention(model, inputs, overlap=True)
        one = ClusterAttention(model, inputs, ClusterShape(model, shape, cluster))
        layer = model.weights.layers[0]
        expected = three(projected, layer, theirs).clone().float()
        got = one(projected, layer, mine).clone().float()
        rows = sum(len(part.tokens) for part in step)
        error = (got[:rows] - expected[:rows]).norm(dim=1) / expected[:rows].norm(dim=1)
        assert float(error.max()) < 1e-2
        torch.testing.assert_close(mine.key[:-1], theirs.key[:-1], atol=2e-2, rtol=2e-2)
        assert torch.equal(mine.value[:-1], theirs.value[:-1])
