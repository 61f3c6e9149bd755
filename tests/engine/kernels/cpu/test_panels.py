"""Products with packed weights: right in every shape, the same in any company, and kept once."""

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_engine.attention import cpu
from ssd_engine.attention.sdpa import SdpaBackend
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.errors import SelfCheckError
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.kernels.cpu import library
from ssd_engine.kernels.cpu.library import INSTRUCTION_SETS
from ssd_engine.kernels.cpu.panels import PackedWeight, PanelKernel, load_kernel
from ssd_engine.kernels.cpu.row_attention import load_row_attention
from ssd_engine.models import linear
from ssd_engine.models.decoder import LayerWeights
from ssd_engine.models.linear import choose_panels, look_up, packed_linear
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.self_check.check import check_model
from tests.harness import make_runner
from tests.random_models import make_model
from tests.suite.scale import share
from tests.suite.tools import needs_tool
from tests.thread_ranks import ThreadRanks

KERNELS = [kernel for name in INSTRUCTION_SETS if (kernel := load_kernel(name)) is not None]
CPU = torch.device("cpu")
CHUNKS = [Chunk(list(range(3, 40)), 0, [4, 1, 3], 37), Chunk([7], 0, [0], 1)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instructions)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@needs_tool("a C compiler", "cc")
def test_it_was_built_with_the_package() -> None:
    assert load_kernel() is not None
    assert load_kernel("portable") is not None


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(kernel: PanelKernel, x: Tensor, weight: Tensor) -> Tensor:
    return PackedWeight.of(kernel, [weight]).multiply(x)


def assert_close(ours: Tensor, x: Tensor, weight: Tensor) -> None:
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    assert ((ours - exact).abs() <= 1e-5 * size + 1e-12).all()


# Products


@each_kernel
@settings(max_examples=share(300), deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 140),
    st.integers(1, 600),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_every_shape_is_the_product_in_double_precision(
    kernel: PanelKernel, rows: int, outputs: int, inputs: int, narrow: bool, seed: int
) -> None:
    x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 1)
    weight = weight.bfloat16() if narrow else weight
    assert_close(product(kernel, x, weight), x, weight)


@each_kernel
@pytest.mark.parametrize("rows", [256, 257, 600])
def test_rows_beyond_one_block(kernel: PanelKernel, rows: int) -> None:
    x, weight = random(rows, 70), random(40, 70)
    assert_close(product(kernel, x, weight), x, weight)


@each_kernel
@each_dtype
def test_a_row_depends_neither_on_its_company_nor_on_threads(
    kernel: PanelKernel, dtype: torch.dtype, threads: None
) -> None:
    """Sums over 700 inputs are cut into blocks where there are many rows; 200 outputs are several
    turns for two threads."""
    x, weight = random(64, 700), PackedWeight.of(kernel, [random(200, 700, seed=1).to(dtype)])
    torch.set_num_threads(1)
    alone = torch.cat([weight.multiply(x[i : i + 1]) for i in range(64)])
    for number in (1, 2):
        torch.set_num_threads(number)
        for rows in range(1, 65):
            assert torch.equal(weight.multiply(x[:rows]), alone[:rows])
            assert torch.equal(weight.multiply(x[-rows:]), alone[-rows:])


@each_kernel
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_bfloat16_has_the_bits_of_the_same_weights_in_float32(
    kernel: PanelKernel, rows: int
) -> None:
    x, weight = random(rows, 333), random(77, 333, seed=1).bfloat16()
    assert torch.equal(product(kernel, x, weight), product(kernel, x, weight.float()))


def test_instructions_that_fuse_agree_bit_for_bit() -> None:
    x, weight = random(20, 300), random(50, 300, seed=1)
    found = [product(k, x, weight) for k in KERNELS if k.instructions != "portable"]
    assert all(torch.equal(found[0], other) for other in found[1:])


@each_kernel
def test_nothing_is_written_beside_the_result(kernel: PanelKernel) -> None:
    x, weight = random(5, 64), random(19, 64)
    room = torch.full((7, 19), 7.0)
    kernel.multiply_into(room[1:6], x, PackedWeight.of(kernel, [weight]).panels)
    assert (room[0] == 7.0).all()
    assert (room[6] == 7.0).all()
    assert_close(room[1:6], x, weight)


@each_kernel
def test_rows_that_are_not_contiguous(kernel: PanelKernel) -> None:
    x, weight = random(64, 5).t(), random(24, 64)
    assert_close(product(kernel, x, weight), x, weight)


@each_kernel
def test_no_rows(kernel: PanelKernel) -> None:
    assert product(kernel, random(0, 8), random(5, 8)).shape == (0, 5)


def test_a_bias_is_added() -> None:
    x, weight, bias = random(3, 40), random(50, 40, seed=1), random(50, seed=2)
    packed = PackedWeight.of(KERNELS[0], [weight])
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(packed_linear(x, packed, bias), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_computes_alone(threads: None) -> None:
    """The threads of its parent are not there."""
    torch.set_num_threads(2)
    x, weight = random(4, 700), PackedWeight.of(KERNELS[0], [random(500, 700, seed=1)])
    expected = weight.multiply(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(weight.multiply(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_callers_do_not_disturb_each_other(threads: None) -> None:
    torch.set_num_threads(2)
    x, weight = random(6, 700), PackedWeight.of(KERNELS[0], [random(500, 700, seed=1)])
    expected = weight.multiply(x)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: weight.multiply(x), range(40))
        assert all(torch.equal(each, expected) for each in found)


# Weights


def plain(packed: PackedWeight) -> torch.Tensor:
    return torch.cat(list(packed.split(packed.shape[0])))


@each_dtype
@pytest.mark.parametrize("sizes", [(1,), (32,), (33,), (16, 8, 8), (40, 3, 70)])
def test_a_packed_weight_gives_back_every_row(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [random(size, 21, seed=i).to(dtype) for i, size in enumerate(sizes)]
    whole, packed = torch.cat(parts), PackedWeight.of(KERNELS[0], parts)
    assert packed.shape == whole.shape
    assert packed.dtype == dtype
    assert torch.equal(plain(packed), whole)
    tokens = torch.tensor([0, len(whole) - 1, len(whole) // 2, 0])
    assert torch.equal(look_up(packed, tokens), whole[tokens])
    assert torch.equal(torch.cat(list(packed.split(7))), whole)


def test_parts_of_two_dtypes_are_widened() -> None:
    parts = [random(5, 9).bfloat16(), random(4, 9)]
    packed = PackedWeight.of(KERNELS[0], parts)
    assert torch.equal(plain(packed), torch.cat([part.float() for part in parts]))


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_share_the_memory_of_the_whole(ranks: int, dtype: torch.dtype) -> None:
    """The last ranks have rows that are not there."""
    weight, x, per_rank = random(101, 30).to(dtype), random(4, 30, seed=1), -(-101 // ranks) + 1
    whole = PackedWeight.of(KERNELS[0], [weight])
    parts = [whole.part(i * per_rank, (i + 1) * per_rank) for i in range(ranks)]
    out = torch.cat([part.multiply(x) for part in parts], dim=1)
    assert torch.equal(out[:, :101], whole.multiply(x))
    assert not out[:, 101:].any()
    assert torch.equal(torch.cat([plain(part) for part in parts])[:101], weight)
    memory = whole.panels.untyped_storage().data_ptr()
    assert all(part.panels.untyped_storage().data_ptr() == memory for part in parts)


# Models


def save_as_bfloat16(family: str, directory: Path) -> None:
    """A model whose weights are numbers of bfloat16."""
    make_model(family, directory).bfloat16().save_pretrained(directory)


def logits(runner: ModelRunner) -> Tensor:
    out = runner.forward(CHUNKS)
    assert out is not None
    return out


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied", "qwen2.5"])
def test_a_model_of_bfloat16_has_the_bits_of_float32(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_bfloat16(family, tmp_path)
    narrow = make_runner(tmp_path, 128)
    for name in ("qkv", "o", "gate_up", "down"):
        assert getattr(narrow.model.weights.layers[0], name).dtype == torch.bfloat16
    assert narrow.model.weights.head.dtype == narrow.model.weights.embedding.dtype
    assert narrow.model.weights.norm.dtype == torch.float32
    with monkeypatch.context() as patch:
        patch.setattr(load_kernel(), "keeps_bfloat16", False)
        wide = make_runner(tmp_path, 128)
    assert wide.model.weights.head.dtype == torch.float32
    assert torch.equal(logits(narrow), logits(wide))
    plain = logits(make_runner(tmp_path, 128, kernels="torch"))
    torch.testing.assert_close(logits(narrow), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied"])
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    save_as_bfloat16(family, tmp_path)
    expected = logits(make_runner(tmp_path, 128))
    parts, barrier = [torch.empty(0)] * 2, threading.Barrier(2)

    def one_rank(rank: int) -> Tensor | None:
        return make_runner(tmp_path, 128, tp=ThreadRanks(rank, parts, barrier)).forward(CHUNKS)

    with ThreadPoolExecutor(2) as pool:
        ours, other = pool.map(one_rank, range(2))
    assert ours is not None
    assert other is None
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied"])
def test_an_expanded_model_is_packed_and_scores_as_plain_weights_do(
    family: str, tmp_path: Path
) -> None:
    save_as_bfloat16(family, tmp_path)
    runner = make_runner(tmp_path, 128)
    options = replace(runner.options, expand_to=ModelShape(hidden=100, ff=300, vocab=515))
    both = [
        ModelRunner(load_model_config(tmp_path), replace(options, kernels=kernels), SingleRank())
        for kernels in ("auto", "torch")
    ]
    assert isinstance(both[0].model.weights.head, PackedWeight)
    assert both[0].model.weights.head.dtype == torch.float32  # what is scaled is no bfloat16
    ours, plain = (logits(each) for each in both)
    torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_there_is_one_copy_of_every_weight(family: str, kept: torch.dtype, tmp_path: Path) -> None:
    """All bytes that the model holds are the checkpoint's, and what fills up last panels."""
    model = make_model(family, tmp_path)
    model.to(kept).save_pretrained(tmp_path)
    parameters = list(model.parameters())  # tied ones once
    expected = sum(p.numel() * (kept.itemsize if p.dim() == 2 else 4) for p in parameters)
    weights = make_runner(tmp_path, 128).model.weights
    matrices = [weights.head, *(m for layer in weights.layers for m in matrices_of(layer))]
    expected += sum(-m.shape[0] % 32 * m.shape[1] * kept.itemsize for m in matrices)
    held = [weights.embedding, weights.norm, *matrices]
    held += [t for layer in weights.layers for t in (layer.attention_norm, layer.mlp_norm)]
    stores = [(m.panels if isinstance(m, PackedWeight) else m).untyped_storage() for m in held]
    assert sum({store.data_ptr(): store.nbytes() for store in stores}.values()) == expected


def matrices_of(layer: LayerWeights) -> list[PackedWeight]:
    found = [getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")]
    assert all(isinstance(one, PackedWeight) for one in found)
    return found


def test_the_self_check_knows_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_bfloat16("qwen3", tmp_path)
    options = replace(make_runner(tmp_path, 128).options, max_forward_tokens=6)
    runner = ModelRunner(load_model_config(tmp_path), options, SingleRank())
    del runner.model.weights.layers[1:], runner.kv.layers[1:]
    check_model(runner)
    multiply = PackedWeight.multiply
    monkeypatch.setattr(
        PackedWeight, "multiply", lambda self, x: multiply(self, x) * (1 + 1e-3 * (len(x) == 5))
    )
    with pytest.raises(SelfCheckError, match="of a forward of 5 rows"):
        check_model(runner)


# What is said


def test_layout_and_instructions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kernel = choose_panels("auto", torch.float32, CPU)
    assert kernel is not None
    assert f"in panels of 32 outputs for {kernel.instructions};" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "dtype", "reason"),
    [
        (None, torch.float32, "was not built"),
        (KERNELS[0], torch.bfloat16, "torch.bfloat16 on a CPU: weights stay plain"),
    ],
)
def test_what_cannot_be_packed_stays_plain_and_says_so(
    kernel: PanelKernel | None,
    dtype: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(linear, "load_kernel", lambda: kernel)
    assert choose_panels("auto", dtype, CPU) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message


def test_without_the_extension_a_model_is_served_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_bfloat16("llama3-tied", tmp_path)
    expected = logits(make_runner(tmp_path, 128))
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(linear, "load_kernel", load_kernel.__wrapped__)
    monkeypatch.setattr(cpu, "load_row_attention", load_row_attention.__wrapped__)
    runner = make_runner(tmp_path, 128)
    assert isinstance(runner.model.weights.head, Tensor)
    assert isinstance(runner.model.attention, SdpaBackend)
    torch.testing.assert_close(logits(runner), expected, atol=1e-4, rtol=1e-4)
