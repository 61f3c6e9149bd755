"""Checkpoints of dense random weights: as large as a published model, and no weight is zero.

The scales are such that the model behaves like a trained one. All layers together add little more
to the hidden state than the embedding has given, each its part of it: so small changes of the
weights are small changes of the logits, however many layers there are. Attention prefers some
tokens to others. The likeliest next token has about half of the probability.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import ModelConfig, load_model_config, parse_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.checkpoints.tokenizer_files import count_tokens
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from tools.gpu.checkpoint_files import write_weights
from tools.gpu.shapes import SHAPES

TOKENIZER = "stories-target"  # the shipped model whose tokenizer, chat template included, is taken
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

LOGITS = 7.5  # standard deviation over the vocabulary
SCORES = 2.0  # of attention, over the keys
LAYERS = 1.5  # what all layers add to the hidden state, in sizes of the embedding
GATED = 0.6  # size of silu(x) * y for normal x and y
SPREAD = 0.4  # of norm weights, around their mean
BIAS = 0.2
NOISE = 0.03  # of a copy that is right, as a draft, about three times out of four


def write_dense(
    shape: str,
    folder: Path,
    layers: int | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    padding: int = 0,
    fading: float = 1.0,
) -> Path:
    """A model directory. ``layers``, and ``changes`` of other values of config.json, make it
    smaller than the shape's. ``padding``: rows of the head that are no token's; below 0, tokens
    that have no row. ``fading``: what a layer adds, of what the one before it does."""
    description = {**SHAPES[shape], **(changes or {})}
    if layers is not None:
        description["num_hidden_layers"] = layers
    config = parse_model_config(description)
    _write_description(folder, description, padding)
    generator = torch.Generator(_device()).manual_seed(seed)
    shapes = expected_shapes(config)

    def make(name: str) -> Tensor:
        scale = _fading(name, fading, config)
        return scale * _random(name, shapes[name], config, generator)

    write_weights(folder, shapes, make)
    return folder


def write_noisy(
    source: Path,
    folder: Path,
    noise: float = NOISE,
    seed: int = 1,
    rows: int | None = None,
    layers: int | None = None,
) -> Path:
    """The same model, each of whose matrices has noise of so much of its own spread. ``rows``: of
    its head; what is more than the source's only pads it. ``layers``: so many, the first ones."""
    description = json.loads((source / "config.json").read_text())
    if layers is not None:
        description["num_hidden_layers"] = layers
    tokens = count_tokens(source) or description["vocab_size"]
    description["vocab_size"] = rows = rows or description["vocab_size"]
    _write_description(folder, description, rows - tokens)
    entries = open_checkpoint(source, load_model_config(source)).entries
    kept = {name: entries[name] for name in expected_shapes(load_model_config(folder))}
    generator = torch.Generator(_device()).manual_seed(seed)

    def with_noise(name: str) -> Tensor:
        with safe_open(entries[name].file, framework="pt") as file:
            weight = file.get_tensor(name).to(generator.device).float()
        if weight.dim() > 1:
            weight += noise * weight.std() * _normal(weight.shape, generator)
        if name.split(".")[-2] in ("embed_tokens", "lm_head"):
            more = (max(0, rows - len(weight)), weight.shape[1])
            weight = torch.cat((weight[:rows], weight.std() * _normal(more, generator)))
        return weight

    write_weights(folder, kept, with_noise)
    return folder


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _write_description(folder: Path, description: Mapping[str, Any], padding: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(description, indent=1))
    for name in TOKENIZER_FILES:
        shutil.copy(resolve_model(TOKENIZER) / name, folder)
    _add_tokens(folder, description["vocab_size"] - padding)


def _add_tokens(folder: Path, number: int) -> None:
    """So many tokens has the tokenizer then. Those that are new are in no text, but may be drawn:
    a whole head is sampled over."""
    file = folder / "tokenizer.json"
    content, known = json.loads(file.read_text()), count_tokens(folder) or 0
    content["model"]["vocab"] |= {f"new{i}": i for i in range(known, number)}
    file.write_text(json.dumps(content))


def _random(
    name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> Tensor:
    module = name.split(".")[-2]
    if name.endswith(".bias"):
        return BIAS * _normal(shape, generator)
    if len(shape) == 1:
        return _norm_weight(module, shape, config, generator)
    return _scale(module, config) / math.sqrt(shape[1]) * _normal(shape, generator)


def _fading(name: str, fading: float, config: ModelConfig) -> float:
    """The factor of what a layer adds; all layers together add as much as they do otherwise."""
    if fading == 1.0 or not name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1.0
    squares = [fading ** (2 * layer) for layer in range(config.num_layers)]
    return float(fading ** int(name.split(".")[2]) / math.sqrt(sum(squares) / len(squares)))


def _scale(module: str, config: ModelConfig) -> float:
    """The size of what comes out of a matrix, where what goes in is of size 1."""
    embedding = LOGITS / math.sqrt(config.hidden_size)
    each = LAYERS * embedding / math.sqrt(2 * config.num_layers)
    return {
        "embed_tokens": LOGITS,
        "lm_head": LOGITS,
        "q_proj": math.sqrt(SCORES),
        "k_proj": math.sqrt(SCORES),
        "o_proj": each,
        "down_proj": each / GATED,
    }.get(module, 1.0)


def _norm_weight(
    module: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator
) -> Tensor:
    """Under a tied head half of the last norm's weights are negative: else every token would be
    the likeliest one after itself."""
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    weight = 1 - SPREAD + 2 * SPREAD * uniform
    if module in ("q_norm", "k_norm"):
        return math.sqrt(SCORES) * weight
    if module == "norm" and config.tie_word_embeddings:
        signs = torch.rand(shape, generator=generator, device=generator.device)
        return torch.where(signs < 0.5, -weight, weight)
    return weight


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """No value is zero."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    return values.masked_fill_(values == 0, 1.0)
