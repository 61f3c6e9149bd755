"""Models against their oracle: Hugging Face transformers on the same weights, in float32."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
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
from tests.harness import Request, make_core, make_runner, run
from tests.random_models import FAMILIES, make_model
from tests.suite.scale import FULL, full_only, share
from tests.thread_ranks import ThreadRanks

NUM_PROMPTS = 20
NEW_TOKENS = 256 if FULL else 48
SHIPPED = "stories-target"
HEROES = (
    "a shy lamb",
    "a brave fox",
    "an old bear",
    "a little girl and her kite",
    "two friends who build a boat",
    "a dragon who fears fire",
    "a boy who plants a seed",
    "a rabbit and the moon",
    "a robot who lost his hat",
    "a bird who cannot sing",
)


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
        for i, hero in zip(range(0, NUM_PROMPTS, 2), HEROES, strict=True):
            content = f"Tell me a story about {hero}."
            chosen[i] = tokenizer.encode_chat([{"role": "user", "content": content}])
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
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


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
    ours = []
    for begin, end in pieces:
        logits = runner.forward([Chunk(tokens[begin:end].tolist(), begin, blocks, end - begin)])
        assert logits is not None
        ours.append(logits)
    assert (torch.cat(ours) - expected).abs().max().item() < 1e-4


# Several KV heads to a rank, and several ranks to a KV head.
@pytest.mark.parametrize("ranks", [2, full_only(4)])
@pytest.mark.parametrize("family", ["mistral", "olmo2", full_only("olmo2-biases"), "qwen3"])
def test_ranks_compute_together_what_transformers_does(
    tmp_path: Path, family: str, ranks: int
) -> None:
    oracle = make_model(family, tmp_path)
    prompt = list(range(3, 60))
    parts: list[torch.Tensor] = [torch.empty(0)] * ranks
    barrier = threading.Barrier(ranks)

    def generate(rank: int) -> list[int]:
        runner = make_runner(tmp_path, num_blocks=128, tp=ThreadRanks(rank, parts, barrier))
        tokens, given = list(prompt), prompt
        for _ in range(NEW_TOKENS):
            chunk = Chunk(given, len(tokens) - len(given), list(range(32)), 1)
            logits = runner.forward([chunk])
            given = box.said(rank, logits)
            tokens += given
        return tokens[len(prompt) :]

    box = SaidByFirst(barrier)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(generate, range(ranks)))
    assert found == [oracle_tokens(oracle, prompt)] * ranks


class SaidByFirst:
    """The likeliest token, which the rank that has the logits tells the others."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self._token = 0

    def said(self, rank: int, logits: torch.Tensor | None) -> list[int]:
        assert (logits is not None) == (rank == 0)
        if logits is not None:
            self._token = int(logits[-1].argmax())
        self._barrier.wait(timeout=60)
        token = self._token
        self._barrier.wait(timeout=60)
        return [token]


def test_neighbours_in_a_batch_do_not_change_logits(
    pair: tuple[PreTrainedModel, ModelRunner],
) -> None:
    _, runner = pair
    text = list(range(3, 43))
    alone = runner.forward([Chunk(text, 0, [0, 1, 2], 1)])
    batch = [
        Chunk(list(range(50, 57)), 0, [3], 1),
        Chunk(text, 0, [4, 5, 6], 1),
        Chunk(list(range(60, 100)), 0, [7, 8, 9], 2),
    ]
    together = runner.forward(batch)
    assert alone is not None
    assert together is not None
    assert (alone[0] - together[1]).abs().max().item() < 1e-4


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # falls back, on CPUs without fp16
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32(tmp_path: Path, dtype: str) -> None:
    make_model("qwen3", tmp_path)
    chunk = [Chunk(list(range(3, 67)), 0, [0, 1, 2, 3], 64)]
    exact, rough = (make_runner(tmp_path, 256, dtype=d).forward(chunk) for d in ("float32", dtype))
    assert exact is not None
    assert rough is not None
    assert rough.dtype == torch.float32
    assert ((exact - rough).norm() / exact.norm()).item() < 0.05


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    make_model("qwen2.5", tmp_path / "one")
    make_model("qwen2.5", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    chunk = [Chunk([5, 6, 7], 0, [0], 3)]
    one, many = (make_runner(tmp_path / d, 256).forward(chunk) for d in ("one", "many"))
    assert one is not None
    assert many is not None
    assert torch.equal(one, many)


class TestStrictLoading:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        make_model("llama3-untied", tmp_path)
        return tmp_path

    def edit(self, directory: Path, change: object) -> None:
        file = directory / "model.safetensors"
        weights = load_file(file)
        change(weights)  # type: ignore[operator]
        save_file(weights, file, metadata={"format": "pt"})

    def refusal(self, directory: Path) -> str:
        with pytest.raises(ModelError) as caught:
            open_checkpoint(directory, load_model_config(directory))
        return str(caught.value)

    def test_a_missing_weight_is_named(self, directory: Path) -> None:
        self.edit(directory, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
        assert "model.layers.1.mlp.up_proj.weight is missing" in self.refusal(directory)

    def test_an_extra_weight_is_named(self, directory: Path) -> None:
        self.edit(directory, lambda w: w.update({"model.extra.weight": torch.zeros(2)}))
        assert "model.extra.weight is not part of this model" in self.refusal(directory)

    def test_a_misshaped_weight_is_named_with_both_shapes(self, directory: Path) -> None:
        self.edit(directory, lambda w: w.update({"model.norm.weight": torch.zeros(65)}))
        assert "model.norm.weight has shape [65], config.json asks for [64]" in self.refusal(
            directory
        )

    def test_a_weight_of_an_unknown_dtype_is_named(self, directory: Path) -> None:
        self.edit(
            directory, lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
        )
        assert "model.norm.weight has dtype I8" in self.refusal(directory)

    def test_a_truncated_file_is_refused(self, directory: Path) -> None:
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
        assert "not a complete safetensors file" in self.refusal(directory)

    def test_an_index_that_names_a_missing_shard_is_refused(self, tmp_path: Path) -> None:
        make_model("qwen3", tmp_path, max_shard_size="100KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        assert f"shard {shard.name} is missing" in self.refusal(tmp_path)

    def test_an_index_that_names_the_wrong_shard_is_refused(self, tmp_path: Path) -> None:
        make_model("qwen3", tmp_path, max_shard_size="100KB")
        index = tmp_path / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        names = sorted(set(content["weight_map"].values()))
        content["weight_map"]["model.norm.weight"] = next(
            n for n in names if n != content["weight_map"]["model.norm.weight"]
        )
        index.write_text(json.dumps(content))
        assert "model.norm.weight is not in" in self.refusal(tmp_path)

    def test_a_tied_head_that_differs_is_refused(self, tmp_path: Path) -> None:
        make_model("llama3-tied", tmp_path)
        self.edit(tmp_path, lambda w: w.update({"lm_head.weight": torch.ones(512, 64)}))
        assert "lm_head.weight differs from the embedding" in self.refusal(tmp_path)

    def test_a_tied_head_that_is_a_copy_is_accepted(self, tmp_path: Path) -> None:
        make_model("llama3-tied", tmp_path)
        self.edit(
            tmp_path,
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
        )
        open_checkpoint(tmp_path, load_model_config(tmp_path))

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
        self, directory: Path, key: str, value: object, message: str
    ) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
        assert message in self.refusal(directory)


@pytest.mark.parametrize(
    ("window", "is_refused"), [(None, False), (2048, False), (1024, True), ("absent", True)]
)
def test_a_sliding_window_is_refused_by_name(
    tmp_path: Path, window: object, is_refused: bool
) -> None:
    """One that is as long as the longest text limits nothing; what says nothing has 4,096."""
    make_model("mistral", tmp_path)
    file = tmp_path / "config.json"
    content = {**json.loads(file.read_text()), "sliding_window": window}
    if window == "absent":
        del content["sliding_window"]
        content["max_position_embeddings"] = 32768
    file.write_text(json.dumps(content))
    if not is_refused:
        load_model_config(tmp_path)
        return
    with pytest.raises(ModelError, match="sliding_window: sliding windows are not supported"):
        load_model_config(tmp_path)


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
    both = runner.forward([Chunk(short[-1:], 4, [9], 1), Chunk(long[-1:], 56, [1, 2, 3, 4], 1)])
    assert alone is not None
    assert both is not None
    assert both.isfinite().all()
    assert (both[0] - alone[0]).abs().max().item() < 1e-4


class _SmallestOf:
    """A tensor-parallel group of which another rank has less memory."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1

    def __init__(self, other: int) -> None:
        self.other = other

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def minimum(self, value: int) -> int:
        return min(value, self.other)


def test_the_size_of_the_cache_is_the_minimum_over_ranks(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    assert make_runner(tmp_path, 300, tp=_SmallestOf(200)).num_blocks == 200
    assert make_runner(tmp_path, 150, tp=_SmallestOf(200)).num_blocks == 150


def test_a_rank_without_room_for_one_sequence_is_a_clear_error(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="lower --max-model-len to 640 or give more memory"):
        make_runner(tmp_path, 300, tp=_SmallestOf(40))
