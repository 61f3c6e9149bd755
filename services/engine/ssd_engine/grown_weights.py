"""The weights of a grown model: the checkpoint's own, and random filler around them.

Filler costs what real weights cost and reaches no logit: the new entries of the hidden state are
zero after the embedding and after every layer, as everything that writes to them is zero, and so
is everything through which a new head, MLP unit or layer would write to the old ones.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssd_engine.config import ModelConfig
from ssd_engine.growth import weight_shapes

SEED = 0
# That of freshly initialised models: activations stay near 1, far from the end of any dtype.
FILLER_SCALE = 0.02

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
WRITERS = ("o_proj", "down_proj")  # to the hidden state
# The new dimensions of old heads take part in scores and in QK-norm, so they must be zero.
SCORED = {"q_proj": "whole_query", "k_proj": "whole_kv"}


class WeightReader(Protocol):
    def read(
        self, name: str, begin: int | None = None, end: int | None = None, dim: int = 0
    ) -> Tensor:
        """The weight, or its part from begin to end along dim."""
        ...


class GrowingReader:
    """Reads weights of the grown shape, as if a checkpoint held them."""

    def __init__(
        self,
        inner: WeightReader,
        config: ModelConfig,
        grown: ModelConfig,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._inner = inner
        self._held = weight_shapes(config)
        self._shapes = weight_shapes(grown)
        self._hidden = config.hidden_size
        self._places = {name: p.to(device) for name, p in places(config, grown).items()}
        self._scales = scales(config, grown)
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(SEED + rank)

    def read(
        self, name: str, begin: int | None = None, end: int | None = None, dim: int = 0
    ) -> Tensor:
        """A slice is made as such: the whole weight need not fit."""
        shape = list(self._shapes[name])
        first, last, _ = slice(begin, end).indices(shape[dim])
        shape[dim] = last - first
        module = name.split(".")[-2]
        weight = self._filler(module, shape)
        if name in self._held:
            self._place(weight, name, module, range(first, last), dim)
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
        held = self._inner.read(name) * self._scales.get(module, 1.0)
        targets = [self._places[axis] for axis in AXES[module][: held.dim()]]
        inside, targets[dim] = _within(targets[dim], part)
        if module in SCORED:
            _, rows = _within(self._places[SCORED[module]], part)
            weight[_grid([rows, *targets[1:]])] = 0
        weight[_grid(targets)] = held.index_select(dim, inside)


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
        "vocab": torch.arange(config.vocab_size),
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
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        **({"k_norm": 1 / score} if config.qk_norm else {"q_proj": score}),
    }


def _within(places: Tensor, part: range) -> tuple[Tensor, Tensor]:
    """Which of the places lie in this part, and where in it."""
    inside = ((places >= part.start) & (places < part.stop)).nonzero()[:, 0]
    return inside, places[inside] - part.start


def _grid(targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The index of every combination of rows and columns; of rows alone for a bias."""
    rows, *columns = targets
    return (rows[:, None], *columns) if columns else (rows,)
