"""Models against their oracle: Hugging Face transformers on the same weights, in float32."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.errors import ConfigError, ModelError
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.text.tokenizer import Tokenizer
from tests.engine.models.test_finite_weights import OneOfTwo
from tests.harness import Request, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model
from tests.suite.scale import FULL, full_only, share
from tests.thread_ranks import ThreadRanks, on_ranks
from tools.bench_kit import story_prompts

NUM_PROMPTS = 20
NEW_TOKENS = 256 if FULL else 48
SHIPPED = "stories-target"


# What the untied one has, the tied one and others that are not tied have between them.
@pytest.fixture(
    scope="module",
    params=[
        SHIPPED,
        *(full_only(each) if each == "llama3-untied" else each for each in FAMILIES),
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, ModelRunner]:
    """transformers' model and ours, of the same weights."""
    if request.param == SHIPPED:
        directory = resolve_model(SHIPPED)
        oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    else:
        directory = tmp_path_factory.mktemp(request.param)
        oracle = make_model(request.param, directory)
    return oracle, make_runner(directory, num_blocks=1024)


def prompts(runner: ModelRunner) -> list[list[int]]:
    """Random tokens; for the shipped target every second one is the request for a story."""
    config = runner.config
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 120, (NUM_PROMPTS,), generator=generator).tolist()
    chosen = [
        torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in lengths
    ]
    if runner.options.directory == resolve_model(SHIPPED):
        tokenizer = Tokenizer(runner.options.directory, config)
        asked = [[{"role": "user", "content": each}] for each in story_prompts(10, seed=0)]
        chosen[::2] = [tokenizer.encode_chat(each) for each in asked]
    return chosen


def oracle_tokens(oracle: PreTrainedModel, prompt: list[int]) -> list[int]:
    out = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_equal_transformers(pair: tuple[PreTrainedModel, ModelRunner]) -> None:
    oracle, runner = pair
    chosen = prompts(runner)[: share(NUM_PROMPTS)]
    requests = [Request(prompt, max_tokens=NEW_TOKENS) for prompt in chosen]
    ours = run(make_core(runner), requests)
    for prompt, result in zip(chosen, ours, strict=True):
        assert result.tokens == oracle_tokens(oracle, prompt)


def test_logits_are_within_1e_4_of_transformers(
    pair: tuple[PreTrainedModel, ModelRunner],
) -> None:
    """Over a text that is prefilled in uneven pieces, then decoded, in scattered blocks."""
    oracle, runner = pair
    tokens = torch.randint(
        3, runner.config.vocab_size, (400,), generator=torch.Generator().manual_seed(1)
    )
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = oracle(tokens[None]).logits[0]
    pieces = [(0, 1), (1, 130), (130, 131), (131, 390), *((i, i + 1) for i in range(390, 400))]
    ours = [
        runner.forward([Chunk(tokens[begin:end].tolist(), begin, blocks, end - begin)])
        for begin, end in pieces
    ]
    assert (torch.cat(ours) - expected).abs().max().item() < 1e-4


# Several KV heads to a rank, and several ranks to a KV head.
@pytest.mark.parametrize("ranks", [2, full_only(4)])
@pytest.mark.parametrize("family", ["mistral", "olmo2", full_only("olmo2-biases"), "qwen3"])
def test_ranks_compute_together_what_transformers_does(
    tmp_path: Path, family: str, ranks: int
) -> None:
    oracle, tokens = make_model(family, tmp_path), list(range(3, 80))
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]

    def compute(rank: ThreadRanks) -> list[torch.Tensor | None]:
        runner = make_runner(tmp_path, num_blocks=128, tp=rank)
        ends = [57, *range(58, 78)]  # a prompt, and one token after the other
        chunks = [Chunk(tokens[a:b], a, list(range(32)), b - a) for a, b in pairwise([0, *ends])]
        return [runner.forward([chunk]) for chunk in chunks]

    first, *others = on_ranks(ranks, compute)
    logits = torch.cat([each for each in first if each is not None])
    assert (logits - expected).abs().max().item() < 1e-4
    assert all(each is None for other in others for each in other)


@pytest.mark.parametrize("family", ["llama3-untied", "qwen3", "olmo2"])
def test_hidden_states_at_boundaries_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle, tokens, last = make_model(family, tmp_path), list(range(3, 40)), []
    runner = make_runner(tmp_path)
    layers = runner.config.num_layers
    runner.watch(tuple(range(layers + 1)))
    runner.forward([Chunk(tokens, 0, list(range(3)), 1)])
    # transformers gives the last one after the final norm, which a boundary is before.
    norm = oracle.get_submodule("model.norm")
    norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        found = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([each[0] for each in (*found[:layers], *last)], dim=-1)
    assert (runner.features - expected).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # falls back, on CPUs without fp16
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(tmp_path: Path, dtype: str) -> None:
    make_model("qwen3", tmp_path)
    chunk = Chunk(list(range(3, 67)), 0, [0, 1, 2, 3], 64)
    exact, rough = (
        make_runner(tmp_path, 256, dtype=each).forward([chunk]) for each in ("float32", dtype)
    )
    assert rough.dtype == torch.float32
    assert ((exact - rough).norm() / exact.norm()).item() < 0.05


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    make_model("qwen2.5", tmp_path / "one")
    make_model("qwen2.5", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (make_runner(tmp_path / name, 256) for name in ("one", "many"))
    chunk = Chunk([5, 6, 7], 0, [0], 3)
    assert torch.equal(one.forward([chunk]), many.forward([chunk]))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(directory, load_model_config(directory))
    return str(caught.value)


def change_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    """None: without this one."""
    file = directory / "model.safetensors"
    weights = {**load_file(file), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, file, metadata={"format": "pt"})


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama3-untied", {UP: None}, f"{UP} is missing"),
        (
            "llama3-untied",
            {"model.extra.weight": torch.zeros(2)},
            "model.extra.weight is not part of this model",
        ),
        (
            "llama3-untied",
            {NORM: torch.zeros(65)},
            f"{NORM} has shape [65], config.json asks for [64]",
        ),
        ("llama3-untied", {NORM: torch.zeros(64, dtype=torch.int8)}, f"{NORM} has dtype I8"),
        (
            "llama3-tied",
            {"lm_head.weight": torch.ones(512, 64)},
            "lm_head.weight differs from the embedding",
        ),
    ],
)
def test_weights_that_are_not_the_configs_are_named(
    tmp_path: Path, family: str, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    make_model(family, tmp_path)
    change_weights(tmp_path, **changes)
    assert message in refusal(tmp_path)


def test_a_tied_head_that_is_a_copy_is_accepted(tmp_path: Path) -> None:
    embedding = make_model("llama3-tied", tmp_path).get_input_embeddings().weight.detach()
    change_weights(tmp_path, **{"lm_head.weight": embedding})
    open_checkpoint(tmp_path, load_model_config(tmp_path))


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, max_shard_size="100KB")
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    whole, names = index.read_text(), json.loads(index.read_text())["weight_map"]
    other = next(name for name in names.values() if name != names[NORM])
    index.write_text(json.dumps({"weight_map": {**names, NORM: other}}))
    assert f"{NORM} is not in" in refusal(tmp_path)
    index.write_text(whole)
    first.write_bytes(first.read_bytes()[:-10])
    assert "not a complete safetensors file" in refusal(tmp_path)
    first.unlink()
    assert f"shard {first.name} is missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["GPT2LMHeadModel"], "GPT2LMHeadModel is not supported"),
        ("hidden_act", "gelu", "hidden_act"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}, "rope_type: yarn"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("num_key_value_heads", 3, "num_key_value_heads"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    make_model("llama3-untied", tmp_path)
    change_config(tmp_path, **{key: value})
    assert message in refusal(tmp_path)


def test_a_sliding_window_is_refused_by_name(tmp_path: Path) -> None:
    """One that is as long as the longest text limits nothing; what says nothing has 4,096."""
    make_model("mistral", tmp_path)
    for window in (None, 2048):
        change_config(tmp_path, sliding_window=window)
        load_model_config(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["sliding_window"]
    for refused in (
        {**content, "sliding_window": 1024},
        {**content, "max_position_embeddings": 32768},
    ):
        (tmp_path / "config.json").write_text(json.dumps(refused))
        assert "sliding_window: sliding windows are not supported" in refusal(tmp_path)


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf")])
def test_what_an_earlier_sequence_left_in_a_block_reaches_nobody(
    tmp_path: Path, rubbish: float
) -> None:
    """Padding reads beyond the end of the shorter sequence, into the rest of its last block."""
    make_model("qwen3", tmp_path)
    runner = make_runner(tmp_path, 256)
    short, long = list(range(3, 8)), list(range(3, 60))
    alone = runner.forward([Chunk(short, 0, [9], 1)])
    for cache in runner.kv.layers:
        cache.key.fill_(rubbish)
        cache.value.fill_(rubbish)
    runner.forward([Chunk(short[:-1], 0, [9], 0), Chunk(long[:-1], 0, [1, 2, 3, 4], 0)])
    ends = [Chunk(short[-1:], 4, [9], 1), Chunk(long[-1:], 56, [1, 2, 3, 4], 1)]
    both = runner.forward(ends)
    assert both.isfinite().all()
    assert (both[0] - alone[0]).abs().max().item() < 1e-4


def test_the_size_of_the_cache_is_the_minimum_over_ranks(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    assert make_runner(tmp_path, 300, tp=OneOfTwo(0, 200)).num_blocks == 200
    assert make_runner(tmp_path, 150, tp=OneOfTwo(0, 200)).num_blocks == 150
    with pytest.raises(ConfigError, match="lower --max-model-len to 640 or give more memory"):
        make_runner(tmp_path, 300, tp=OneOfTwo(0, 40))
