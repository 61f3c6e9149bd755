"""Our CUDA sources, thread by thread on a CPU: what they compute, and that they come to an end."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.execution import step_attention
from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.step_attention import (
    ClusterAttention,
    ClusterShape,
    TritonAttention,
    largest_cluster,
)
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.step_inputs import StepInputs, StepRun, StepShape
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products import products
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import (
    _Balanced,
    _Resident,
    _Split,
)
from ssd_engine.kvcache.cache import LayerCache
from tests.engine.kernels.emulated import EmulatedKernel, Emulator, emulated_map
from tests.engine.kernels.products.product_oracle import (
    EPS,
    PAGE,
    attention_model,
    check_product,
    tree_after,
)
from tests.suite.scale import FULL, full_only
from tests.suite.tools import needs_tool

pytestmark = needs_tool("g++")

CPU = torch.device("cpu")
ROOM = 400  # positions of a sequence
DUMMY = 3 * ROOM
BLOCKS = [list(range(i * ROOM // PAGE, (i + 1) * ROOM // PAGE)) for i in range(3)]


@pytest.fixture(autouse=True)
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (products, step_attention):
        monkeypatch.setattr(module, "compiled_kernel", emulator)
    monkeypatch.setattr(step_attention, "tensor_map", emulated_map)


# Products


@pytest.mark.parametrize(
    ("kind", "shape", "processors"),
    [
        full_only(_Resident, ProductShape(192, 1024, 5, norm=True), 4),
        (_Resident, ProductShape(256, 1024, 24, norm=True, gated=True), 3),
        full_only(_Split, ProductShape(64, 512, 8, residual=True), 4),
        full_only(_Split, ProductShape(48, 1024, 24), 4),
        (_Balanced, ProductShape(128, 1024, 5, residual=True), 5),  # tiles of a block and a half
        full_only(_Balanced, ProductShape(64, 8192, 8), 7),  # of several blocks each
        full_only(_Balanced, ProductShape(64, 3072, 24, residual=True), 3),
    ],
    ids=["x-shared", "gated", "split", "split-24", "one-and-a-half", "many-blocks", "balanced-24"],
)
def test_products_are_those_of_torch_in_whatever_order_blocks_come(
    kind: Any, shape: ProductShape, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = check_product(kind, shape, processors, CPU)
    monkeypatch.setattr(EmulatedKernel, "backwards", True)
    assert torch.equal(check_product(kind, shape, processors, CPU), forwards)


# Attention


def attended(
    model: Any, step: Sequence[Part], branches: int, processors: int, projected: Tensor, cache: Any
) -> tuple[Tensor, list[StepRun]]:
    shape = StepShape(40, 3, branches, ROOM, PAGE, scratch=branches * 4)
    inputs = StepInputs(shape, CPU)
    inputs.clear(DUMMY)
    runs, _ = step_runs(step, [None] * sum(part.num_logits for part in step), PAGE)
    inputs.fill(runs, DUMMY)
    inputs.copy()
    cluster = largest_cluster(model, shape, processors)
    attend = ClusterAttention(model, inputs, ClusterShape(model, shape, cluster))
    out = attend(projected, model.weights.layers[0], cache)
    return out[: sum(len(part.tokens) for part in step)].clone(), runs


def attention_of(model: Any, projected: Tensor, runs: Sequence[StepRun], cache: Any) -> Tensor:
    """Row by row, in float32; writes the new keys and values to the cache."""
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.config.head_dim
    rows = sum(len(run.tokens) for run in runs)
    x = projected[:rows].view(rows, heads + 2 * kv_heads, dim).float()
    qk, norm = x[:, : heads + kv_heads], model.weights.layers[0].qk_norm
    if norm is not None:
        qk = qk * torch.rsqrt(qk.pow(2).mean(-1, keepdim=True) + EPS) * norm.float()
    positions = torch.tensor([p for run in runs for p in run.positions])
    cosine, sine = (t.float()[positions][:, None] for t in (model.rope.cos, model.rope.sin))
    qk = (qk * cosine + qk.roll(dim // 2, -1) * sine).bfloat16()
    keys, values = cache.key.view(-1, kv_heads, dim), cache.value.view(-1, kv_heads, dim)
    slots = torch.tensor([slot for run in runs for slot in run.slots])
    keys[slots], values[slots] = qk[:, heads:], x[:, heads + kv_heads :].bfloat16()
    out, row = [], 0
    for run in runs:
        for i in range(len(run.tokens)):
            seen = [run.blocks[p // PAGE] * PAGE + p % PAGE for p in range(run.limits[i] + 1)]
            seen += run.scratch[i :: len(run.tokens)]
            k, v = (t[seen].float().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
            score = torch.einsum("shd,hd->hs", k, qk[row, :heads].float()) / math.sqrt(dim)
            out.append(torch.einsum("hs,shd->hd", score.softmax(-1), v).flatten())
            row += 1
    return torch.stack(out)


def make_model(dim: int, heads: int, kv_heads: int, normed: bool) -> Any:
    return attention_model(dim, heads, kv_heads, normed, ROOM, CPU)


# A kernel is compiled for each of these.
each_model = pytest.mark.parametrize(
    ("about", "branches", "processors"),
    [
        full_only((64, 4, 1, False), 8, 99),  # clusters of 8
        ((128, 4, 2, True), 12, 13),  # of 2
        full_only((128, 2, 1, True), 24, 3),  # of 1
        full_only((64, 4, 1, True), 24, 14),  # of 4, with rows for two warpgroups
    ],
    ids=["64", "128-normed", "128-alone", "64-wide"],
)


def make_cache(model: Any) -> LayerCache:
    shape = (DUMMY // PAGE + 1, PAGE, model.num_kv_heads, model.config.head_dim)
    return LayerCache(model.randn(*shape), model.randn(*shape))


def copied(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.key.clone(), cache.value.clone())


def project(model: Any) -> Tensor:
    return model.randn(40, (model.num_heads + 2 * model.num_kv_heads) * model.config.head_dim)


@each_model
def test_attention_is_that_of_torch(about: Any, branches: int, processors: int) -> None:
    model = make_model(*about)
    for context in (1, 64, 200) if FULL else (1, 100):
        for step in (
            [Chunk([1] * 8, context, BLOCKS[0], 8), Chunk([1], 3 * context // 4, BLOCKS[1], 1)],
            [
                Chunk([1] * 5, context, BLOCKS[0], 5),
                tree_after(context, 5, branches, 0, BLOCKS[0]),
                tree_after(context, 0, 3, 2, BLOCKS[2]),
            ],
        ):
            projected, mine = project(model), make_cache(model)
            theirs = copied(mine)
            got, runs = attended(model, step, branches, processors, projected, mine)
            expected = attention_of(model, projected, runs, theirs)
            error = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
            assert float(error.max()) < 5e-3
            assert torch.equal(mine.value, theirs.value)
            torch.testing.assert_close(mine.key, theirs.key, atol=2e-2, rtol=2e-2)


@each_model
@pytest.mark.parametrize("context", [full_only(5), full_only(64), 103])
def test_what_a_block_held_before_is_not_seen(
    about: Any, branches: int, processors: int, context: int
) -> None:
    """Another sequence may have left there what is no number."""
    model = make_model(*about)
    projected, first = project(model), make_cache(model)
    tree = tree_after(context, 0, branches, 1, BLOCKS[1])
    chunk = Chunk([1] * 3, context, BLOCKS[0], 3)
    results = []
    for left in (0.0, math.nan):
        cache = copied(first)
        for part, end in ((chunk, chunk.end), (tree, context)):
            for position in range(end, -(-end // PAGE) * PAGE):
                slot = part.blocks[position // PAGE], position % PAGE
                cache.key[slot] = cache.value[slot] = left
        out, _ = attended(model, [chunk, tree], branches, processors, projected, cache)
        results.append(out)
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


@each_model
def test_attention_of_a_row_has_the_same_bits_alone_and_among_others(
    about: Any, branches: int, processors: int
) -> None:
    model = make_model(*about)
    projected, cache = project(model), make_cache(model)
    parts = [Chunk([1] * 3, 7, BLOCKS[1], 3), Chunk([1] * 3, 127, BLOCKS[0], 3)]
    together, _ = attended(model, parts, branches, processors, projected, cache)
    for row in range(3):  # one after the other, as plain decoding writes them
        one = [Chunk([1], 127 + row, BLOCKS[0], 1)]
        alone, _ = attended(model, one, branches, processors, projected[3 + row :], cache)
        assert torch.equal(alone[0], together[3 + row])


@pytest.mark.parametrize("deepest", [6, 40])
def test_all_shapes_of_a_server_take_the_kernel_of_its_largest(
    monkeypatch: pytest.MonkeyPatch, deepest: int
) -> None:
    """And divide keys as it does: a row's bits must not depend on which of them it is in."""
    monkeypatch.setattr(step_attention, "has_room", lambda *_: True)
    monkeypatch.setattr(step_attention, "compiled_kernel", lambda *_: None)
    model = make_model(64, 4, 1, False)
    kernels = KernelSet(True, False, False, 99, shared_memory=227_000)
    largest = StepShape(8 * deepest, 8, deepest, ROOM, PAGE)
    plain = StepShape(8, 8, 1, ROOM, PAGE)
    made = [
        step_attention.make_attention(model, StepInputs(shape, CPU), kernels, largest)
        for shape in (plain, largest)
    ]
    kind = ClusterAttention if deepest * 4 <= 128 else TritonAttention
    assert [type(each) for each in made] == [kind, kind]
    shapes = [ClusterShape(model, shape, 4, deepest) for shape in (plain, largest)]
    assert shapes[0].key_groups == shapes[1].key_groups
