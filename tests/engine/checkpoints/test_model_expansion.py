"""A grown model is the same function as its checkpoint, and costs what its shape costs."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.checkpoints.expanded_weights import CONSTANT, FILLER_TOKEN_WEIGHT
from ssd_engine.checkpoints.model_config import ModelConfig, load_model_config, parse_model_config
from ssd_engine.checkpoints.model_expansion import (
    SHAPES,
    ModelShape,
    count_parameters,
    grow_config,
    parse_shape,
)
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.models.tensor_parallel import SingleRank, TensorParallel
from ssd_engine.sampling.params import MAX_TEMPERATURE
from ssd_engine.text.tokenizer import Tokenizer
from tests.harness import Request, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model
from tests.suite.scale import full_only
from tests.thread_ranks import ThreadRanks

SHIPPED = "stories-target"
NUM_BLOCKS = 128
RELATIVE_ERROR = 1e-5
# Much larger than any model's: were it handled wrongly, that could not be overlooked.
EPS = 0.05
# Noise is at most 22.88, and that of the best of hundreds of tokens is above 0.
OUT_OF_REACH = 22.9 * MAX_TEMPERATURE


def make_checkpoint(family: str, directory: Path) -> Path:
    make_model(family, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": EPS}))
    return directory


def grow(
    runner: ModelRunner,
    shape: ModelShape,
    tp: TensorParallel | None = None,
    **changes: Any,
) -> ModelRunner:
    """The checkpoint of this runner in another shape."""
    options = replace(runner.options, expand_to=shape, **changes)
    return ModelRunner(load_model_config(options.directory), options, tp or SingleRank())


# What differs most to growth: tied or not, norms of heads.
GROWABLE = [family for family in FAMILIES if not family.startswith("olmo2")]
GROWN = [family if family in ("llama3-tied", "qwen3") else full_only(family) for family in GROWABLE]


def test_a_norm_over_all_heads_cannot_grow(tmp_path: Path) -> None:
    runner = make_runner(make_checkpoint("olmo2", tmp_path), NUM_BLOCKS)
    with pytest.raises(ConfigError, match="--expand-to: a model of olmo2 cannot grow"):
        grow(runner, ModelShape(hidden=128))


@pytest.fixture(scope="module", params=[full_only(SHIPPED), *GROWN])
def original(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelRunner:
    if request.param == SHIPPED:
        return make_runner(resolve_model(SHIPPED), NUM_BLOCKS)
    return make_runner(make_checkpoint(request.param, tmp_path_factory.mktemp("model")), NUM_BLOCKS)


@pytest.fixture(scope="module")
def expected(original: ModelRunner) -> torch.Tensor:
    return logits(original)


def everything(config: ModelConfig) -> ModelShape:
    """No dimension is a multiple of the old one but head_dim; groups grow from g to g + 1."""
    group, kv_heads = config.num_heads // config.num_kv_heads, config.num_kv_heads + 3
    return ModelShape(
        hidden=config.hidden_size + 36,
        layers=config.num_layers + 2,
        heads=(group + 1) * kv_heads,
        kv_heads=kv_heads,
        head_dim=2 * config.head_dim,
        ff=config.intermediate_size + 100,
        vocab=config.vocab_size + 77,
    )


def larger_shapes(config: ModelConfig) -> dict[str, ModelShape]:
    """Every dimension alone, but for vocab, which needs a larger hidden; and all together."""
    return {
        "hidden": ModelShape(hidden=config.hidden_size + 36),
        "layers": ModelShape(layers=config.num_layers + 2),
        "heads": ModelShape(heads=3 * config.num_heads),
        "kv_heads": ModelShape(heads=2 * config.num_heads, kv_heads=2 * config.num_kv_heads),
        "head_dim": ModelShape(head_dim=3 * config.head_dim),
        "ff": ModelShape(ff=config.intermediate_size + 100),
        "vocab": ModelShape(hidden=config.hidden_size + 1, vocab=config.vocab_size + 77),
        "everything": everything(config),
    }


def logits(runner: ModelRunner) -> torch.Tensor:
    """Of a text that is prefilled in two pieces, then decoded, in scattered blocks."""
    tokens = torch.randint(
        3, runner.config.vocab_size, (100,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    blocks = [5, 2, 9, 0, 11, 3, 8]
    pieces = [(0, 37), (37, 95), *((i, i + 1) for i in range(95, 100))]
    rows = []
    for begin, end in pieces:
        out = runner.forward([Chunk(tokens[begin:end], begin, blocks, end - begin)])
        assert out is not None
        rows.append(out)
    return torch.cat(rows).cpu()


def assert_filler_tokens_are_out_of_reach(logits: torch.Tensor, vocab: int) -> None:
    real, filler = logits[:, :vocab], logits[:, vocab:]
    assert filler.isfinite().all()
    assert (real.amin(dim=1) - filler.amax(dim=1)).min().item() > OUT_OF_REACH


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return ((ours - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("dimension", larger_shapes(load_model_config(resolve_model(SHIPPED))))
def test_growth_keeps_the_logits(
    original: ModelRunner, expected: torch.Tensor, dimension: str
) -> None:
    shape, vocab = larger_shapes(original.config)[dimension], original.config.vocab_size
    ours = logits(grow(original, shape))
    assert ours.shape[1] == (shape.vocab or vocab)
    assert relative_error(ours[:, :vocab], expected) < RELATIVE_ERROR
    if shape.vocab:
        assert_filler_tokens_are_out_of_reach(ours, vocab)


def test_a_story_stays_the_same() -> None:
    original = make_runner(resolve_model(SHIPPED), NUM_BLOCKS)
    tokenizer = Tokenizer(original.options.directory, original.config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Tell me about a shy lamb."}])
    grown = grow(original, parse_shape("hidden=320,layers=9,heads=16,head_dim=64,vocab=5000"))
    ours, expected = (
        run(make_core(runner), [Request(prompt, max_tokens=32)])[0].tokens
        for runner in (grown, original)
    )
    assert ours == expected


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # falls back, on CPUs without fp16
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_filler_tokens_change_half_precision_by_its_last_bit_at_most(
    original: ModelRunner, dtype: str
) -> None:
    hidden, vocab = original.config.hidden_size + 36, original.config.vocab_size
    chunk = [Chunk(list(range(3, 11)), 0, [0], 8)]
    without = grow(original, ModelShape(hidden=hidden), dtype=dtype).forward(chunk)
    ours = grow(original, ModelShape(hidden=hidden, vocab=vocab + 77), dtype=dtype).forward(chunk)
    assert without is not None
    assert ours is not None
    assert_filler_tokens_are_out_of_reach(ours, vocab)
    last_bit = torch.finfo(getattr(torch, dtype)).eps
    torch.testing.assert_close(ours[:, :vocab], without, rtol=last_bit, atol=1e-4)


@pytest.mark.parametrize("name", [full_only("stories-target"), "stories-draft"])
def test_filler_tokens_of_the_shipped_pair_are_out_of_reach_after_every_token(name: str) -> None:
    original = make_runner(resolve_model(name), NUM_BLOCKS)
    vocab = original.config.vocab_size
    shape = ModelShape(hidden=original.config.hidden_size + 1, vocab=vocab + 8)
    grown = grow(original, shape, max_num_seqs=NUM_BLOCKS)
    for begin in range(0, vocab, NUM_BLOCKS):
        chunks = [Chunk([begin + i], 0, [i], 1) for i in range(NUM_BLOCKS)]
        out = grown.forward(chunks)
        assert out is not None
        assert_filler_tokens_are_out_of_reach(out, vocab)
        assert out.amin().item() > torch.finfo(torch.float16).min


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama-biases", 2),
        ("qwen3", 8),
        *(full_only(family, 2) for family in ("llama3-tied", "qwen3")),
        *(full_only(family, 8) for family in ("llama3-tied", "llama-biases")),
    ],
)
def test_ranks_grow_together(tmp_path: Path, family: str, ranks: int) -> None:
    """With 8 ranks each of the 4 KV heads is on two; 515 rows of the head do not divide."""
    original = make_runner(make_checkpoint(family, tmp_path), NUM_BLOCKS)
    head_dim = 2 * original.config.head_dim
    shape = ModelShape(
        hidden=100, layers=4, heads=24, kv_heads=4, head_dim=head_dim, ff=256, vocab=515
    )
    parts, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)
    chunk = [Chunk(list(range(3, 60)), 0, [4, 1, 3, 0], 57)]

    def one_rank(rank: int) -> torch.Tensor | None:
        return grow(original, shape, ThreadRanks(rank, parts, barrier)).forward(chunk)

    with ThreadPoolExecutor(ranks) as pool:
        ours, *others = pool.map(one_rank, range(ranks))
    expected = original.forward(chunk)
    assert ours is not None
    assert expected is not None
    assert ours.shape[1] == 515
    assert relative_error(ours[:, :512], expected) < RELATIVE_ERROR
    assert_filler_tokens_are_out_of_reach(ours, 512)
    assert all(other is None for other in others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_growth_on_a_device_keeps_the_logits(original: ModelRunner, expected: torch.Tensor) -> None:
    ours = logits(grow(original, everything(original.config), device="cuda"))
    assert relative_error(ours[:, : original.config.vocab_size], expected) < 1e-3
    assert_filler_tokens_are_out_of_reach(ours, original.config.vocab_size)


@pytest.fixture(scope="module", params=["llama-biases", "qwen3"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, ModelRunner]:
    """A checkpoint's own model, and one grown in everything."""
    directory = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    original = make_runner(directory, NUM_BLOCKS, kernels="torch")
    return original, grow(original, everything(original.config))


# Filler is wherever it may be: weights that are zero might cost less than real ones.


def test_head_and_embedding_are_full_but_for_new_columns_of_the_embedding(
    pair: tuple[ModelRunner, ModelRunner],
) -> None:
    """One of them has a constant, which reaches filler tokens alone."""
    original, grown = pair
    weights = grown.model.weights
    d, vocab = original.config.hidden_size, original.config.vocab_size
    full = (weights.head[:, :d], weights.head[:, d + 1 :], weights.norm)
    assert all(each.all() for each in (*full, weights.embedding[:, :d]))
    assert not weights.embedding[:, d + 1 :].any()
    assert (weights.embedding[:, d] == CONSTANT).all()
    assert not weights.head[:vocab, d].any()
    assert (weights.head[vocab:, d] == FILLER_TOKEN_WEIGHT).all()


def test_layers_are_full_but_for_new_dimensions_of_old_heads(
    pair: tuple[ModelRunner, ModelRunner],
) -> None:
    original, grown = pair
    old = original.config
    silent_rows = (old.num_heads + old.num_kv_heads) * (grown.config.head_dim - old.head_dim)
    for i, layer in enumerate(grown.model.weights.layers):
        rows = silent_rows if i < old.num_layers else 0
        assert (layer.qkv == 0).sum().item() == rows * old.hidden_size
        assert layer.qkv_bias is None or (layer.qkv_bias == 0).sum().item() == rows
        full = (layer.gate_up, layer.gate_up_bias, layer.qk_norm)
        assert all(weight is None or weight.all() for weight in full)
        for norm in (layer.attention_norm, layer.mlp_norm):
            assert (norm == 0).nonzero().tolist() == [[old.hidden_size]]  # the constant


def test_filler_is_small_and_the_same_every_time(pair: tuple[ModelRunner, ModelRunner]) -> None:
    original, grown = pair
    again = grow(original, everything(original.config))
    first, second = (runner.model.weights.layers[-1] for runner in (grown, again))
    assert torch.equal(first.gate_up, second.gate_up)
    assert 0.015 < first.gate_up.std().item() < 0.025


def test_dimensions_are_a_shape() -> None:
    text = "hidden=1024,layers=12, heads=16,kv_heads=8,head_dim=64,ff=4096,vocab=32000"
    assert parse_shape(text) == ModelShape(1024, 12, 16, 8, 64, 4096, 32000)
    assert parse_shape("ff=4096") == ModelShape(ff=4096)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no known shape: give one of llama-3.1-8b"),
        ("llama-9", "'llama-9' is no known shape: give one of llama-3.1-8b"),
        ("width=3", "'width' is no dimension: use hidden, layers"),
        ("hidden=512,", "'' is no dimension: use hidden, layers"),
        ("hidden=512,hidden=1024", "hidden is given twice"),
        ("hidden=0", "hidden: a positive integer is needed, got '0'"),
        ("hidden=-1", "hidden: a positive integer is needed, got '-1'"),
        ("hidden=1e3", "hidden: a positive integer is needed, got '1e3'"),
        ("hidden=²", "hidden: a positive integer is needed, got '²'"),
        # what growth cannot reach
        ("hidden=47", "hidden=47 is less than the checkpoint's 48"),
        ("layers=1", "layers=1 is less than the checkpoint's 2"),
        ("vocab=99", "vocab=99 is less than the checkpoint's 100"),
        ("vocab=101", "vocab=101 needs a larger hidden, too"),
        ("hidden=48,vocab=101", "add hidden=49 or more"),
        ("head_dim=24", "head_dim=24 must be a multiple of the checkpoint's 16"),
        ("heads=6,kv_heads=4", "kv_heads=4 must divide heads=6"),
        ("kv_heads=4", "with kv_heads=4, heads must be at least 8, not 4"),
    ],
)
def test_what_is_no_shape_or_growth_cannot_reach_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^--expand-to: ") as caught:
        grow_config(tiny_config(), parse_shape(text))
    assert message in str(caught.value)


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    raw = dict(
        architectures=[architecture],
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
    )
    return parse_model_config({**raw, **changes})


@pytest.mark.parametrize(
    ("name", "architecture", "tied", "parameters"),
    [
        ("llama-3.1-8b", "LlamaForCausalLM", False, 8_030_261_248),
        ("llama-3.1-70b", "LlamaForCausalLM", False, 70_553_706_496),
        ("llama-3.2-1b", "LlamaForCausalLM", True, 1_235_814_400),
        ("qwen3-32b", "Qwen3ForCausalLM", False, 32_762_123_264),
        ("qwen3-0.6b", "Qwen3ForCausalLM", True, 596_049_920),
    ],
)
def test_a_name_gives_the_size_of_that_model(
    name: str, architecture: str, tied: bool, parameters: int
) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    assert count_parameters(grow_config(config, SHAPES[name])) == parameters


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("model", ["stories-target", "stories-draft"])
def test_the_shipped_pair_grows_to_every_name(model: str, name: str) -> None:
    config = load_model_config(resolve_model(model))
    grown = grow_config(config, parse_shape(f" {name} "))
    assert grown.vocab_size == config.vocab_size
    assert (grown.rope, grown.max_position_embeddings) == (
        config.rope,
        config.max_position_embeddings,
    )


@pytest.mark.parametrize("hidden", [48, 100, 3584, 5120, 12345])
def test_an_empty_shape_changes_nothing(hidden: int) -> None:
    config = tiny_config(hidden_size=hidden)
    assert grow_config(config, ModelShape()) == config
