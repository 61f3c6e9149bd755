"""The weights of a grown model: the checkpoint's own, and random filler around them.

Filler costs what real weights cost and reaches no logit of the checkpoint's tokens: the new entries
of the hidden state are zero after the embedding and after every layer, as everything that writes to
them is zero, and so is everything through which a new head, MLP unit or layer would write to the
old ones.

Where the head grows, its new rows are filler tokens. They are computed and sampled over like all
others, and their logits are too low for any of them to be drawn. The first new entry of the hidden
state sees to that: it is a constant, set by the embedding of every token, written by no layer and
read by none. The final norm makes it 1 / rms, rms being that of the hidden state, and the head
subtracts 2^15 / rms from every filler token's logit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ssd_engine.checkpoints.families.family import QKNorm
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.weight_shapes import expected_shapes

SEED = 0
# That of freshly initialised models: activations stay near 1, far from the end of any dtype.
FILLER_SCALE = 0.02

# The constant entry of the hidden state: the smallest number that float16 holds at full precision.
# Its square is lost in the sum of squares of every norm.
CONSTANT = 2.0**-14
CONSTANT_GAIN = 1 / CONSTANT  # what the final norm multiplies it by
# The head's weight for filler tokens. The last hidden states of the shipped models have an rms of
# 0.7 to 13, so their filler tokens get -47,000 to -2,500. Float16 ends at -65,504. Noise adds at
# most 22.9 times the temperature, which is 100 at most: it never lifts one above all real tokens.
FILLER_TOKEN_WEIGHT = -(2.0**15)

# What each dimension of a weight counts; a bias has the first one alone.
AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("vocab", "hidden"),
    "norm": ("hidden",),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "q_proj": ("query", "hidden"),
    "k_proj": ("kv", "hidden"),
    "v_proj": ("kv", "hidden"),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "o_proj": ("hidden", "query"),
    "gate_proj": ("ff", "hidden"),
    "up_proj": ("ff", "hidden"),
    "down_proj": ("hidden", "ff"),
}
WRITERS = ("o_proj", "down_proj", "fc")  # to the hidden state; fc is a head's
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
# The new dimensions of old heads take part in scores and in QK-norm, so they must be zero.
SCORED = {"q_proj": "whole_query", "k_proj": "whole_kv"}


class WeightReader(Protocol):
    def read(
        self, name: str, begin: int | None = None, end: int | None = None, dim: int = 0
    ) -> Tensor:
        """The weight, or its part from begin to end along dim."""


@dataclass(frozen=True)
class WeightGrowth:
    """Where the weights of a checkpoint lie in grown ones, and what is made up for."""

    held: Mapping[str, tuple[int, ...]]  # shapes by name
    grown: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, tuple[str, ...]]  # by name: what each dimension counts
    places: Mapping[str, Tensor]  # by axis
    scales: Mapping[str, float]  # by module
    # By module, a weight of the constant entry for real tokens, and one for filler tokens.
    constants: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    num_tokens: int = 0  # real ones; of use where there is a constant


def model_growth(config: ModelConfig, grown: ModelConfig) -> WeightGrowth:
    held = expected_shapes(config)
    return WeightGrowth(
        held=held,
        grown=expected_shapes(grown),
        axes={name: AXES[module_of(name)] for name in held},
        places=places(config, grown),
        scales=scales(config, grown),
        constants=constant_weights(config, grown),
        num_tokens=config.vocab_size,
    )


def module_of(name: str) -> str:
    """The module of a weight, or the list of modules that it is in: fc_norm.0.weight is of one."""
    *modules, _ = [part for part in name.split(".") if not part.isdigit()]
    return modules[-1]


class ExpandingReader:
    """Reads weights of the grown shape, as if a checkpoint held them."""

    def __init__(
        self,
        inner: WeightReader,
        growth: WeightGrowth,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._inner, self._growth = inner, growth
        self._hidden = len(growth.places["hidden"])
        self._places = {axis: p.to(device) for axis, p in growth.places.items()}
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(SEED + rank)

    def read(
        self, name: str, begin: int | None = None, end: int | None = None, dim: int = 0
    ) -> Tensor:
        """A slice is made as such: the whole weight need not fit."""
        shape = list(self._growth.grown[name])
        first, last, _ = slice(begin, end).indices(shape[dim])
        shape[dim] = last - first
        module = module_of(name)
        weight = self._filler(module, shape)
        if name in self._growth.held:
            self._place(weight, name, module, range(first, last), dim)
        if module in self._growth.constants:
            self._place_constant(weight, module, first)
        return weight

    def _filler(self, module: str, shape: list[int]) -> Tensor:
        if module in WRITERS:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        weight.normal_(std=FILLER_SCALE, generator=self._generator)
        if module == "embed_tokens":
            weight[:, self._hidden :] = 0
        return weight

    def _place(self, weight: Tensor, name: str, module: str, part: range, dim: int) -> None:
        """Write the checkpoint's weight to where it belongs, as far as that is in this part."""
        held = self._inner.read(name) * self._growth.scales.get(module, 1.0)
        targets = [self._places[axis] for axis in self._growth.axes[name][: held.dim()]]
        inside, targets[dim] = _within(targets[dim], part)
        if module in SCORED:
            _, rows = _within(self._places[SCORED[module]], part)
            weight[_grid([rows, *targets[1:]])] = 0
        weight[_grid(targets)] = held.index_select(dim, inside)

    def _place_constant(self, weight: Tensor, module: str, first_row: int) -> None:
        """Write the weights that set or read the constant entry of the hidden state."""
        real, filler = self._growth.constants[module]
        if weight.dim() == 1:
            weight[self._hidden] = real
            return
        num_real = max(0, self._growth.num_tokens - first_row)
        weight[:num_real, self._hidden] = real
        weight[num_real:, self._hidden] = filler


def places(config: ModelConfig, grown: ModelConfig) -> dict[str, Tensor]:
    """Along each axis, the new index of every old one.

    RoPE pair i of head_dim hd turns as fast as pair i * (hd'/hd) of hd'; in the layout of pairs
    (i, i + hd/2) that puts dimension i at i * (hd'/hd) in both halves. A query head keeps its KV
    head: it is the same one of a group that may now be larger.
    """
    dims = torch.arange(config.head_dim) * (grown.head_dim // config.head_dim)
    group = config.num_heads // config.num_kv_heads
    query, kv = torch.arange(config.num_heads), torch.arange(config.num_kv_heads)
    query = query // group * (grown.num_heads // grown.num_kv_heads) + query % group
    every_dim = torch.arange(grown.head_dim)

    def rows(heads: Tensor, dims: Tensor) -> Tensor:
        return (heads[:, None] * grown.head_dim + dims).flatten()

    return {
        "vocab": torch.arange(config.embedding_rows),
        "hidden": torch.arange(config.hidden_size),
        "ff": torch.arange(config.intermediate_size),
        "head_dim": dims,
        "query": rows(query, dims),
        "kv": rows(kv, dims),
        "whole_query": rows(query, every_dim),
        "whole_kv": rows(kv, every_dim),
    }


def scales(config: ModelConfig, grown: ModelConfig) -> dict[str, float]:
    """What a larger mean under a norm, and a larger head_dim under a score, are made up for with.

    Under QK-norm the two meet in q_norm, and cancel.
    """
    norm = math.sqrt(config.hidden_size / grown.hidden_size)
    score = math.sqrt(grown.head_dim / config.head_dim)
    return {
        "norm": norm,
        **dict.fromkeys(LAYER_NORMS, norm),
        **({"k_norm": 1 / score} if config.traits.qk_norm is QKNorm.HEAD else {"q_proj": score}),
    }


def constant_weights(config: ModelConfig, grown: ModelConfig) -> dict[str, tuple[float, float]]:
    """By module, a weight of the constant entry for real tokens, and one for filler tokens.

    With tied embeddings the constant is also the head's weight for real tokens: their logits all
    grow by CONSTANT / rms, which changes no probability.
    """
    if grown.embedding_rows == config.embedding_rows:
        return {}
    gain = CONSTANT_GAIN * scales(config, grown)["norm"]
    tied = config.tie_word_embeddings
    return {
        "embed_tokens": (CONSTANT, FILLER_TOKEN_WEIGHT if tied else CONSTANT),
        "lm_head": (0.0, FILLER_TOKEN_WEIGHT),
        "norm": (gain, gain),
        **dict.fromkeys(LAYER_NORMS, (0.0, 0.0)),
    }


def _within(places: Tensor, part: range) -> tuple[Tensor, Tensor]:
    """Which of the places lie in this part, and where in it."""
    inside = ((places >= part.start) & (places < part.stop)).nonzero()[:, 0]
    return inside, places[inside] - part.start


def _grid(targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The index of every combination of rows and columns; of rows alone for a bias."""
    rows, *columns = targets
    return (rows[:, None], *columns) if columns else (rows,)
