"""Attention on a CPU: right in every shape, and a row has the same bits in any company."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_engine.attention.base import QueryRun, Run, TreeRun
from ssd_engine.attention.cpu import CpuBackend, choose_row_attention
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.kernels.cpu.library import INSTRUCTION_SETS
from ssd_engine.kernels.cpu.row_attention import RowAttentionKernel, load_row_attention
from ssd_engine.kvcache.cache import LayerCache
from tests.harness import make_runner
from tests.random_models import FAMILIES, make_model
from tests.suite.scale import full_only, share

KERNELS = [kernel for name in INSTRUCTION_SETS if (kernel := load_row_attention(name)) is not None]
BLOCK, NUM_BLOCKS = 16, 40
CPU = torch.device("cpu")
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instructions)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_cache(kv_heads: int, dim: int) -> LayerCache:
    shape = (NUM_BLOCKS, BLOCK, kv_heads, dim)
    return LayerCache(random(*shape, seed=1), random(*shape, seed=2))


def attend(kernel: RowAttentionKernel, query: Tensor, cache: LayerCache, runs: list[Run]) -> Tensor:
    backend = CpuBackend(kernel, query.shape[1], cache.key.shape[2])
    return backend.attend(query, cache, backend.plan(runs))


def slots_seen(run: Run, row: int) -> list[int]:
    tree = isinstance(run, TreeRun)
    end = run.limits[row] + 1 if tree else run.context - run.length + row + 1
    own = [run.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(end)]
    return [*own, *run.scratch[row :: run.length]] if tree else own


def expected(query: Tensor, cache: LayerCache, runs: Sequence[Run]) -> Tensor:
    """In double precision, row by row."""
    heads, (_, _, kv_heads, dim) = query.shape[1], cache.key.shape
    rows = []
    for number, slots in enumerate(slots_seen(run, i) for run in runs for i in range(run.length)):
        key, value = (
            pages.view(-1, kv_heads, dim)[slots].double() for pages in (cache.key, cache.value)
        )
        asked = query[number].double().view(kv_heads, heads // kv_heads, dim)
        scores = asked @ key.permute(1, 2, 0) / math.sqrt(dim)
        rows.append((torch.softmax(scores, -1) @ value.transpose(0, 1)).flatten())
    return torch.stack(rows)


@st.composite
def some_runs(draw: st.DrawFn) -> list[Run]:
    runs: list[Run] = []
    for _ in range(draw(st.integers(1, 3))):
        context, length = draw(st.integers(1, 200)), draw(st.integers(1, 40))
        blocks = draw(st.permutations(range(NUM_BLOCKS)))[: -(-(context + 8) // BLOCK)]
        if draw(st.booleans()):
            limits = [context - 1 + draw(st.integers(0, 7)) for _ in range(length)]
            depths = draw(st.integers(0, 3))
            scratch = draw(st.permutations(range(NUM_BLOCKS * BLOCK)))[: depths * length]
            runs.append(TreeRun(length, context, blocks, limits, scratch))
        else:
            runs.append(QueryRun(min(length, context), context, blocks))
    return runs


SHAPES = [(4, 4, 64), (8, 2, 16), (6, 2, 128), (5, 1, 24), (2, 2, 7), (64, 1, 32)]


@each_kernel
@settings(deadline=None, max_examples=share(200))
@given(shape=st.sampled_from(SHAPES), runs=some_runs())
def test_every_shape_is_attention_in_double_precision(
    kernel: RowAttentionKernel, shape: tuple[int, int, int], runs: list[Run]
) -> None:
    heads, kv_heads, dim = shape
    cache, query = make_cache(kv_heads, dim), random(sum(run.length for run in runs), heads, dim)
    result = attend(kernel, query, cache, runs).double()
    torch.testing.assert_close(result, expected(query, cache, runs), atol=1e-5, rtol=1e-5)


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(
    kernel: RowAttentionKernel, shape: tuple[int, int, int]
) -> None:
    heads, kv_heads, dim = shape
    cache, blocks = make_cache(kv_heads, dim), list(range(9, 30))
    query, context = random(150, heads, dim), 300
    whole = attend(kernel, query, cache, [QueryRun(150, context, blocks)])
    for at in (0, 1, 37, 149):
        alone = QueryRun(1, context - 149 + at, blocks)
        other = QueryRun(3, 77, blocks[::-1])
        company = torch.cat((query[:3], query[at : at + 1]))
        for runs, rows in ([alone], query[at : at + 1]), ([other, alone], company):
            assert torch.equal(attend(kernel, rows, cache, list(runs))[-1], whole[at])


@each_kernel
def test_neither_pages_nor_threads_nor_branches_change_a_bit(kernel: RowAttentionKernel) -> None:
    """A branch that is kept beside its sequence sees what the sequence's own tokens would."""
    cache, query = make_cache(2, 64), random(4, 8, 64)
    there, elsewhere = list(range(20)), list(range(39, 19, -1))
    for pages in (cache.key, cache.value):
        pages[elsewhere] = pages[there]
    whole = attend(kernel, query, cache, [QueryRun(4, 320, there)])
    assert torch.equal(attend(kernel, query, cache, [QueryRun(4, 320, elsewhere)]), whole)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(attend(kernel, query, cache, [QueryRun(4, 320, there)]), whole)
    torch.set_num_threads(before)
    last = elsewhere[-1] * BLOCK + BLOCK - 1
    tree = TreeRun(1, 300, there, [318], [last])
    assert torch.equal(attend(kernel, query[3:], cache, [tree]), whole[3:])


def test_instructions_that_fuse_agree_bit_for_bit() -> None:
    fused = [kernel for kernel in KERNELS if kernel.instructions != "portable"]
    cache, query = make_cache(3, 40), random(70, 6, 40)
    runs: list[Run] = [QueryRun(70, 400, list(range(25)))]
    results = [attend(kernel, query, cache, runs) for kernel in fused]
    assert all(torch.equal(result, results[0]) for result in results)


@each_kernel
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(kernel: RowAttentionKernel, wrong: float) -> None:
    cache, query = make_cache(1, 16), random(2, 1, 16)
    cache.key[0, 3] = wrong
    result = attend(kernel, query, cache, [QueryRun(2, 20, [0, 1])])
    assert result.isnan().any(dim=1).all()


@each_kernel
def test_a_weight_far_below_the_others_is_nothing(kernel: RowAttentionKernel) -> None:
    cache = LayerCache(torch.zeros(2, BLOCK, 1, 16), random(2, BLOCK, 1, 16))
    cache.key[0, 5] = 1000.0
    result = attend(kernel, torch.ones(1, 1, 16), cache, [QueryRun(1, 32, [0, 1])])
    torch.testing.assert_close(result[0], cache.value[0, 5, 0])


def test_other_numbers_and_other_kernels_are_torchs() -> None:
    assert choose_row_attention("auto", torch.float32, CPU) is load_row_attention()
    assert choose_row_attention("auto", torch.bfloat16, CPU) is None
    assert choose_row_attention("torch", torch.float32, CPU) is None


# A whole model


def score(runner: ModelRunner, pieces: Sequence[int], company: int) -> Tensor:
    """The logits of 60 tokens that are read in pieces, beside others."""
    tokens, parts = list(range(3, 63)), []
    others = [Chunk(tokens[:company], 0, [20, 21, 22], company)] if company else []
    for begin, end in pairwise(accumulate(pieces, initial=0)):
        mine = Chunk(tokens[begin:end], begin, [1, 5, 3, 9], end - begin)
        parts.append(runner.forward([*others, mine])[begin - end :].clone())
    return torch.cat(parts)


@pytest.mark.parametrize(
    "family", [name if name == "qwen3" else full_only(name) for name in FAMILIES]
)
def test_a_model_gives_a_text_the_same_bits_however_it_is_read(family: str, tmp_path: Path) -> None:
    """So log probabilities are plain decoding's to the last bit: verified in any pieces, beside
    any others, and read again by another server that goes on with a text."""
    make_model(family, tmp_path)
    runner = make_runner(tmp_path, 128)
    whole = score(runner, [60], 0)
    for pieces, company in (([1] * 60, 0), ([7] * 8 + [4], 5), ([30, 1, 1, 5, 23], 33)):
        assert torch.equal(score(runner, pieces, company), whole)
