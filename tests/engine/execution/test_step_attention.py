"""All of a step's attention in one kernel, against the three of Triton. Runs on a CUDA device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.step_attention import (
    ClusterAttention,
    ClusterShape,
    TritonAttention,
    largest_cluster,
)
from ssd_engine.forward.batch import Chunk, Part, TreeRows
from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kvcache.cache import LayerCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOM = 1600  # positions of a sequence
DUMMY = 4 * ROOM


def attention_model(dim: int, heads: int, kv_heads: int, normed: bool) -> Any:
    """As much of a decoder as attention asks for."""
    generator = torch.Generator("cuda").manual_seed(dim + heads)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    norm = 1 + 0.1 * randn(heads + kv_heads, dim) if normed else None
    layer = SimpleNamespace(qk_norm=norm, o=None)
    half = [randn(ROOM, dim // 2) for _ in range(2)]
    return SimpleNamespace(
        num_heads=heads,
        num_kv_heads=kv_heads,
        config=SimpleNamespace(head_dim=dim, qk_norm_eps=1e-5),
        weights=SimpleNamespace(norm=randn(4), layers=[layer]),
        rope=SimpleNamespace(
            cos=torch.cat((half[0], half[0]), dim=1), sin=torch.cat((-half[1], half[1]), dim=1)
        ),
        randn=randn,
    )


def tree_after(context: int, chain: int, branches: int, depth: int, blocks: list[int]) -> TreeRows:
    first = blocks[-16] * 16
    scratch = list(range(first, first + branches * (depth + 1)))
    limits = [context - 1 + i % (chain + 1) for i in range(branches)]
    positions = [limit + depth + 1 for limit in limits]
    slots = scratch[-branches:]
    return TreeRows([1] * branches, positions, limits, slots, context, blocks, scratch)


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "normed"),
    [(128, 16, 4, False), (128, 16, 8, True), (64, 32, 8, False), (128, 64, 8, True)],
)
@pytest.mark.parametrize(("context", "processors"), [(1, 132), (61, 132), (250, 20), (1000, 999)])
def test_attention_in_one_kernel_is_that_of_three(
    dim: int, heads: int, kv_heads: int, normed: bool, context: int, processors: int
) -> None:
    model = attention_model(dim, heads, kv_heads, normed)
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
        results = []
        for kind in ("three", "one"):
            mine = LayerCache(cache[0].clone(), cache[1].clone())
            attend = (
                TritonAttention(model, inputs, overlap=True)
                if kind == "three"
                else ClusterAttention(
                    model,
                    inputs,
                    ClusterShape(
                        model, inputs.shape, largest_cluster(model, inputs.shape, processors)
                    ),
                )
            )
            out = attend(projected, model.weights.layers[0], mine)
            results.append((out.clone().float(), mine))
        (expected, theirs), (got, mine) = results
        rows = sum(len(part.tokens) for part in step)
        error = (got[:rows] - expected[:rows]).norm(dim=1) / expected[:rows].norm(dim=1)
        assert float(error.max()) < 1e-2
        torch.testing.assert_close(mine.key[:-1], theirs.key[:-1], atol=2e-2, rtol=2e-2)
        assert torch.equal(mine.value[:-1], theirs.value[:-1])
