"""Small random checkpoints of every supported family, made by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    # Wide enough that neighbouring logits are well apart: near-ties would test nothing.
    initializer_range=0.15,
    bos_token_id=0,
    eos_token_id=1,
)
LLAMA3_ROPE: dict[str, Any] = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))


def _olmo2(**changes: Any) -> PreTrainedModel:
    few = {**SMALL, "num_attention_heads": 4, "tie_word_embeddings": False}
    return Olmo2ForCausalLM(Olmo2Config(**few, **changes))


FAMILIES: dict[str, Any] = {
    "llama2": lambda: _llama(num_key_value_heads=8, tie_word_embeddings=False),
    "llama3-tied": lambda: _llama(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama3-untied": lambda: _llama(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama-linear-rope": lambda: _llama(
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SMALL, head_dim=16, sliding_window=None, tie_word_embeddings=False)
    ),
    "olmo2": lambda: _olmo2(),
    "olmo2-biases": lambda: _olmo2(attention_bias=True),
    "qwen2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False)),
}


def make_model(family: str, directory: Path, max_shard_size: str = "1GB") -> PreTrainedModel:
    """Save a random model of this family; returns transformers' own."""
    torch.manual_seed(sum(map(ord, family)))
    model = FAMILIES[family]().float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
