"""The config.json of published models, with the special tokens of the shipped tokenizer."""

from typing import Any

SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    head_dim: int,
    feed_forward: int,
    *,
    rope_factor: float,
    tied: bool,
) -> dict[str, Any]:
    """Llama 3.1 and 3.2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **_COMMON,
    }


def _qwen2(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    *,
    vocab: int,
    positions: int,
    tied: bool,
) -> dict[str, Any]:
    """Qwen2.5: heads of hidden / heads dimensions, and biases of q, k and v, go without saying."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        **_COMMON,
    }


def _qwen3(
    hidden: int, layers: int, heads: int, feed_forward: int, *, tied: bool
) -> dict[str, Any]:
    """Qwen3, whose norms of queries and keys go without saying."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        **_COMMON,
    }


def _mistral(hidden: int, layers: int, heads: int, feed_forward: int) -> dict[str, Any]:
    """Mistral from v0.3 on: no window."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        **_COMMON,
    }


def _olmo2(hidden: int, layers: int, heads: int, feed_forward: int) -> dict[str, Any]:
    """OLMo 2, where as many heads have keys as have queries."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **_COMMON,
    }


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    **SPECIAL_TOKENS,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(2048, 16, 32, 64, 8192, rope_factor=32.0, tied=True),
    "llama-3.2-3b": _llama(3072, 28, 24, 128, 8192, rope_factor=32.0, tied=True),
    "llama-3.1-8b": _llama(4096, 32, 32, 128, 14336, rope_factor=8.0, tied=False),
    "mistral-7b": _mistral(4096, 32, 32, 14336),
    "olmo2-7b": _olmo2(4096, 32, 32, 11008),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, vocab=151936, positions=32768, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, vocab=151936, positions=131072, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, vocab=152064, positions=131072, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
}
