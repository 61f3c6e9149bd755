"""What a model is: its shape, read from a Hugging Face ``config.json``. No torch here."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssd_engine.errors import ConfigError, ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow RoPE frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int  # the tokens there are
    head_rows: int  # of the head, all sampled over: tokens, and those that growth adds
    embedding_rows: int  # of the embedding and the head, rows that only pad them included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_heads_per_rank(self, ranks: int) -> int:
        """With more ranks than KV heads, neighbouring ranks hold the same one."""
        return max(1, self.num_kv_heads // ranks)


def check_tensor_parallel(config: ModelConfig, ranks: int) -> None:
    """Heads and MLP units are dealt out whole; KV heads may be repeated."""
    if config.num_heads % ranks or config.intermediate_size % ranks:
        raise ConfigError(
            f"--tp {ranks} must divide {config.num_heads} attention heads and "
            f"{config.intermediate_size} MLP units"
        )
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise ConfigError(
            f"--tp {ranks} and {config.num_kv_heads} KV heads: one must divide the other"
        )


def load_model_config(directory: Path) -> ModelConfig:
    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is not None:
        raw["eos_token_id"] = eos
    config = parse_model_config(raw)
    tokens = count_tokens(directory)
    if tokens is None or tokens >= config.vocab_size:
        return config
    tokens = max(tokens, *(token + 1 for token in config.eos_token_ids), 0)
    return replace(config, vocab_size=tokens, head_rows=tokens)


def count_tokens(directory: Path) -> int | None:
    """One more than the highest token id of the tokenizer; None where its files do not say.

    Published models pad the rows of their head, each size of a family in its own way.
    """
    try:
        content = _read_json(directory / "tokenizer.json")
        settings_file = directory / "tokenizer_config.json"
        settings = _read_json(settings_file) if settings_file.is_file() else {}
        vocabulary = content["model"]["vocab"]
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else [*vocabulary.values()]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        ids += [int(token) for token in settings.get("added_tokens_decoder") or ()]
        return max(ids) + 1
    except (ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None  # whoever loads the tokenizer says what is wrong with it


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Accept what the engine computes exactly; refuse every variant that it would get wrong."""
    try:
        config = _parse(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"config.json: a value is missing or of the wrong type: {error!r}"
        ) from None
    _check_values(config)
    return config


def _check_values(config: ModelConfig) -> None:
    rope, outside = config.rope, [t for t in config.eos_token_ids if not 0 <= t < config.vocab_size]
    bad = {
        f"rms_norm_eps: {config.rms_norm_eps}": not 0 < config.rms_norm_eps < 1,
        f"rope_theta: {rope.theta}": not 0 < rope.theta < math.inf,
        f"rope factor: {rope.linear_factor}": not 0 < rope.linear_factor < math.inf,
        f"head_dim: {config.head_dim}": config.head_dim < 2 or config.head_dim % 2 != 0,
        f"eos_token_id: {outside} is not in the vocabulary": bool(outside),
    }
    for problem, found in bad.items():
        if found:
            raise ModelError(f"config.json: {problem}")


def _parse(raw: dict[str, Any]) -> ModelConfig:
    name = (raw.get("architectures") or ["(none)"])[0]
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config.json: architectures: {name} is not supported, only {known}")
    _refuse_unsupported(raw)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads: {kv_heads} does not divide {heads} heads"
        )
    vocab, eps = _positive(raw, "vocab_size"), float(raw.get("rms_norm_eps", 1e-6))
    llama_bias = architecture == "llama" and bool(raw.get("attention_bias", False))
    qwen3_bias = architecture == "qwen3" and bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        head_rows=vocab,
        embedding_rows=vocab,
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=eps,
        qk_norm_eps=eps,
        rope=_parse_rope(raw),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or llama_bias or qwen3_bias,
        o_bias=llama_bias or qwen3_bias,
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_tuple(raw.get("eos_token_id")),
    )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise ModelError("config.json: quantization_config: quantised weights are not supported")
    if raw.get("use_sliding_window"):
        raise ModelError("config.json: use_sliding_window: sliding windows are not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ModelError("config.json: layer_types: only full_attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"config.json: hidden_act: {raw['hidden_act']} is not supported, only silu"
        )


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (new) and ``rope_theta`` with ``rope_scaling`` (old)."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor: only 1.0 is supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(rope["factor"]))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
        return RopeConfig(theta, llama3=scaling)
    raise ModelError(
        f"config.json: rope_type: {kind} is not supported, only default, linear and llama3"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _positive(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {key}: a positive integer is needed, got {value!r}")
    return value


def _tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
