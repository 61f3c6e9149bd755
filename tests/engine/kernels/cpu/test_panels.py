"""Products with packed weights: right in every shape, the same in any company, and kept once."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd_engine.forward.batch import Chunk
from ssd_engine.kernels.cpu import library
from ssd_engine.kernels.cpu.library import INSTRUCTION_SETS
from ssd_engine.kernels.cpu.panels import PackedWeight, PanelKernel, load_kernel
from ssd_engine.kernels.cpu.row_attention import load_row_attention
from ssd_engine.models import linear
from ssd_engine.models.linear import choose_panels, look_up
from tests.harness import make_runner
from tests.random_models import make_model
from tests.suite.scale import FULL, share
from tests.suite.tools import needs_tool

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


def assert_close(ours: Tensor, x: Tensor, weight: Tensor) -> None:
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    assert ((ours - exact).abs() <= 1e-5 * size + 1e-12).all()


# Products


@each_kernel
@settings(max_examples=share(300), deadline=None)
@example(257, 40, 70, False, False, 0)  # rows beyond one block
@example(600, 40, 70, True, True, 0)
@given(
    st.integers(0, 70),
    st.integers(1, 140),
    st.integers(1, 600),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_every_shape_is_the_product_in_double_precision(
    kernel: PanelKernel,
    rows: int,
    outputs: int,
    inputs: int,
    narrow: bool,
    turned: bool,
    seed: int,
) -> None:
    """``turned``: rows that are not contiguous."""
    x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 1)
    x = x.t().contiguous().t() if turned else x
    weight = weight.bfloat16() if narrow else weight
    assert_close(PackedWeight.of(kernel, [weight]).multiply(x), x, weight)


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
        for rows in range(1, 65, 1 if FULL else 3):
            assert torch.equal(weight.multiply(x[:rows]), alone[:rows])
            assert torch.equal(weight.multiply(x[-rows:]), alone[-rows:])


def test_instructions_that_fuse_agree_bit_for_bit() -> None:
    x, weight = random(20, 300), random(50, 300, seed=1)
    fused = [kernel for kernel in KERNELS if kernel.instructions != "portable"]
    first, *others = (PackedWeight.of(each, [weight]).multiply(x) for each in fused)
    assert all(torch.equal(first, other) for other in others)


@each_kernel
def test_nothing_is_written_beside_the_result(kernel: PanelKernel) -> None:
    x, weight = random(5, 64), random(19, 64)
    room = torch.full((7, 19), 7.0)
    kernel.multiply_into(room[1:6], x, PackedWeight.of(kernel, [weight]).panels)
    assert (room[0] == 7.0).all()
    assert (room[6] == 7.0).all()
    assert_close(room[1:6], x, weight)


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
@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1,), (32,), (33,), (16, 8, 8), (40, 3, 70)])
def test_a_packed_weight_gives_back_every_row(
    sizes: tuple[int, ...], others: torch.dtype, dtype: torch.dtype
) -> None:
    """Parts of two dtypes are widened."""
    parts = [random(size, 21, seed=i).to(others if i else dtype) for i, size in enumerate(sizes)]
    whole, packed = torch.cat(parts), PackedWeight.of(KERNELS[0], parts)
    assert packed.shape == whole.shape
    assert packed.dtype == whole.dtype
    assert torch.equal(plain(packed), whole)
    tokens = torch.tensor([0, len(whole) - 1, len(whole) // 2, 0])
    assert torch.equal(look_up(packed, tokens), whole[tokens])
    assert torch.equal(torch.cat(list(packed.split(7))), whole)


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


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied", "qwen2.5"])
def test_a_model_of_bfloat16_has_the_bits_of_float32(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(family, tmp_path).bfloat16().save_pretrained(tmp_path)
    narrow = make_runner(tmp_path, 128)
    for name in ("qkv", "o", "gate_up", "down"):
        assert getattr(narrow.model.weights.layers[0], name).dtype == torch.bfloat16
    assert narrow.model.weights.head.dtype == narrow.model.weights.embedding.dtype
    assert narrow.model.weights.norm.dtype == torch.float32
    with monkeypatch.context() as patch:
        patch.setattr(load_kernel(), "keeps_bfloat16", False)
        wide = make_runner(tmp_path, 128)
    assert wide.model.weights.head.dtype == torch.float32
    plain = make_runner(tmp_path, 128, kernels="torch")
    found = narrow.forward(CHUNKS)
    assert torch.equal(found, wide.forward(CHUNKS))
    torch.testing.assert_close(found, plain.forward(CHUNKS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama3-tied", "llama3-untied"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_there_is_one_copy_of_every_weight(family: str, kept: torch.dtype, tmp_path: Path) -> None:
    """All bytes that the model holds are the checkpoint's, and what fills up last panels."""
    model = make_model(family, tmp_path)
    model.to(kept).save_pretrained(tmp_path)
    parameters = list(model.parameters())  # tied ones once
    expected = sum(p.numel() * (kept.itemsize if p.dim() == 2 else 4) for p in parameters)
    weights = make_runner(tmp_path, 128).model.weights
    names = ("qkv", "o", "gate_up", "down")
    matrices = [weights.head, *(getattr(layer, n) for layer in weights.layers for n in names)]
    assert all(isinstance(each, PackedWeight) for each in matrices)
    expected += sum(-m.shape[0] % 32 * m.shape[1] * kept.itemsize for m in matrices)
    held = [weights.embedding, weights.norm, *matrices]
    held += [t for layer in weights.layers for t in (layer.attention_norm, layer.mlp_norm)]
    stores = [(m.panels if isinstance(m, PackedWeight) else m).untyped_storage() for m in held]
    assert sum({store.data_ptr(): store.nbytes() for store in stores}.values()) == expected


# What is said


@pytest.mark.parametrize(
    ("kernel", "dtype", "level", "said"),
    [
        (None, torch.float32, logging.WARNING, "was not built"),
        (KERNELS[0], torch.bfloat16, logging.WARNING, "bfloat16 on a CPU: weights stay plain"),
        (KERNELS[0], torch.float32, logging.INFO, f"of 32 outputs for {KERNELS[0].instructions};"),
    ],
)
def test_what_cannot_be_packed_stays_plain_and_says_so(
    kernel: PanelKernel | None,
    dtype: torch.dtype,
    level: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(linear, "load_kernel", lambda: kernel)
    caplog.set_level(logging.INFO)
    assert choose_panels("auto", dtype, CPU) is (None if level == logging.WARNING else kernel)
    [record] = caplog.records
    assert record.levelno == level
    assert said in record.message


def test_without_the_extension_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: None)
    assert load_kernel.__wrapped__() is None
    assert load_row_attention.__wrapped__() is None
