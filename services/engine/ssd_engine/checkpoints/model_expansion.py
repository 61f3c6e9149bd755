"""Growth: a checkpoint served in a larger shape, with its function unchanged. No torch here.

A shape gives dimensions only; the architecture and the text stay the checkpoint's. A larger
vocabulary is computed and sampled over as a whole, but its new tokens are too unlikely to be drawn.
``expanded_weights.py`` makes the weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ssd_engine.checkpoints.families.family import QKNorm
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from ssd_engine.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Dimensions to grow to. None keeps the checkpoint's."""

    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ff: int | None = None
    vocab: int | None = None


SHAPES = {
    "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
    "llama-3.2-1b": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 128, 25600, 151936),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, 151936),
}

# A shape's dimension, and the field of the config that it sets.
FIELDS = {
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "ff": "intermediate_size",
    "vocab": "embedding_rows",
}


def parse_shape(text: str) -> ModelShape:
    """A name, or ``hidden=1024,layers=12`` with any of the dimensions."""
    text = text.strip()
    if text in SHAPES:
        return SHAPES[text]
    if "=" not in text:
        raise ConfigError(
            f"--expand-to: {text!r} is no known shape: give one of {', '.join(SHAPES)}, "
            "or dimensions such as hidden=1024,layers=12"
        )
    sizes: dict[str, int] = {}
    for item in text.split(","):
        key, value = _parse_dimension(item)
        if key in sizes:
            raise ConfigError(f"--expand-to: {key} is given twice: leave one out")
        sizes[key] = value
    return ModelShape(**sizes)


def _parse_dimension(item: str) -> tuple[str, int]:
    key, _, value = (part.strip() for part in item.partition("="))
    if key not in FIELDS:
        raise ConfigError(f"--expand-to: {key!r} is no dimension: use {', '.join(FIELDS)}")
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ConfigError(f"--expand-to: {key}: a positive integer is needed, got {value!r}")
    return key, int(value)


def grow_config(config: ModelConfig, shape: ModelShape) -> ModelConfig:
    """The config of the grown model; refuses what growth cannot reach with its function kept.

    A norm's mean is now taken over zeros too, d/d' of what it was; eps shrinks with it.
    """
    sizes = {key: getattr(shape, key) or getattr(config, FIELDS[key]) for key in FIELDS}
    _check_growth(config, sizes)
    changes: dict[str, Any] = {FIELDS[key]: size for key, size in sizes.items()}
    if sizes["vocab"] > config.embedding_rows:  # else there is padding still, which is not drawn
        changes["head_rows"] = sizes["vocab"]
    return replace(
        config,
        **changes,
        rms_norm_eps=config.rms_norm_eps * (config.hidden_size / sizes["hidden"]),
        qk_norm_eps=config.qk_norm_eps * (config.head_dim / sizes["head_dim"]),
    )


def _check_growth(config: ModelConfig, sizes: Mapping[str, int]) -> None:
    grows = any(size != getattr(config, FIELDS[key]) for key, size in sizes.items())
    if grows and config.traits.qk_norm is QKNorm.PROJECTION:
        raise ConfigError(
            f"--expand-to: a model of {config.architecture} cannot grow, as its norm of queries "
            "and keys is over all heads together: leave it out"
        )
    for key, size in sizes.items():
        least = getattr(config, FIELDS[key])
        if size < least:
            raise ConfigError(
                f"--expand-to: {key}={size} is less than the checkpoint's {least}: "
                "a model can only grow"
            )
    if sizes["vocab"] > config.embedding_rows and sizes["hidden"] == config.hidden_size:
        raise ConfigError(
            f"--expand-to: vocab={sizes['vocab']} needs a larger hidden, too, as a new entry of "
            "the hidden state keeps the new tokens from being drawn: add "
            f"hidden={config.hidden_size + 1} or more"
        )
    if sizes["head_dim"] % config.head_dim:
        raise ConfigError(
            f"--expand-to: head_dim={sizes['head_dim']} must be a multiple of the "
            f"checkpoint's {config.head_dim}"
        )
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads % kv_heads:
        raise ConfigError(
            f"--expand-to: kv_heads={kv_heads} must divide heads={heads}, as each KV head "
            "is read by as many query heads"
        )
    group = config.num_heads // config.num_kv_heads
    if heads // kv_heads < group:
        raise ConfigError(
            f"--expand-to: {group} query heads read each KV head of the checkpoint: with "
            f"kv_heads={kv_heads}, heads must be at least {group * kv_heads}, not {heads}"
        )


def count_parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())
