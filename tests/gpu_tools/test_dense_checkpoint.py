"""Dense random checkpoints: each family loads strictly, and gives transformers' logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ssd_engine.checkpoints.model_config import load_model_config, parse_model_config
from ssd_engine.checkpoints.model_expansion import count_parameters
from ssd_engine.forward.batch import Chunk
from ssd_engine.text.tokenizer import Tokenizer
from tests.harness import make_runner
from tools.gpu.dense_checkpoint import write_dense, write_noisy
from tools.gpu.shapes import SHAPES

SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=4200,
    max_position_embeddings=2048,
)
MILLIONS = {
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "mistral-7b": 7248,
    "olmo2-7b": 7298,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-7b": 7616,
    "qwen3-0.6b": 596,
    "qwen3-4b": 4022,
    "qwen3-32b": 32762,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_that_of_the_published_model(shape: str) -> None:
    ours, theirs = parse_model_config(SHAPES[shape]), AutoConfig.for_model(**SHAPES[shape])
    assert count_parameters(ours) // 10**6 in (MILLIONS[shape] - 1, MILLIONS[shape])
    assert theirs.architectures == SHAPES[shape]["architectures"]
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "shape", ["llama-3.2-1b", "mistral-7b", "olmo2-7b", "qwen2.5-1.5b", "qwen3-4b"]
)
def test_a_small_one_gives_the_logits_of_transformers(shape: str, tmp_path: Path) -> None:
    folder = write_dense(shape, tmp_path / "model", layers=3, changes=SMALL)
    assert all(bool((weight != 0).all()) for weight in weights(folder).values())
    runner = make_runner(folder)
    tokens = Tokenizer(folder, runner.config).encode_chat([{"role": "user", "content": "A lamb?"}])
    logits = runner.forward([Chunk(tokens, 0, [0, 1], len(tokens))])
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def agreement(*folders: Path) -> float:
    """How often two models say the same after the tokens of a random text."""
    tokens = torch.randint(5, 4000, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    chunk = Chunk(tokens, 0, list(range(13)), 200)
    one, other = (make_runner(folder).forward([chunk]).argmax(dim=-1) for folder in folders)
    return float((one == other).float().mean())


def test_a_noisy_copy_differs_in_every_matrix_and_is_often_right(tmp_path: Path) -> None:
    changes = {**SMALL, "vocab_size": 32_000}
    source = write_dense("qwen2.5-1.5b", tmp_path / "source", changes=changes)
    copy = write_noisy(source, tmp_path / "copy")
    assert load_model_config(copy) == load_model_config(source)
    before, after = weights(source), weights(copy)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        changed = float((weight != after[name]).float().mean())
        assert changed > 0.7 if weight.dim() > 1 else changed == 0, name
    assert 0.55 < agreement(source, copy) < 0.95


def test_the_first_layers_of_a_fading_model_are_a_draft_of_it(tmp_path: Path) -> None:
    """No weight is zero, and every layer counts: but most of what is drawn is decided early."""
    changes = {**SMALL, "vocab_size": 8192}
    whole = write_dense("qwen2.5-1.5b", tmp_path / "whole", layers=8, changes=changes, fading=0.6)
    assert all(bool((weight != 0).all()) for weight in weights(whole).values())
    few = write_noisy(whole, tmp_path / "few", layers=2)
    assert 0.5 < agreement(whole, few) < 0.95


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    made = [
        weights(write_dense("qwen3-0.6b", tmp_path / str(i), layers=1, seed=seed, changes=SMALL))
        for i, seed in enumerate((4, 4, 7))
    ]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not any(torch.equal(made[0][name], made[2][name]) for name in made[0])
