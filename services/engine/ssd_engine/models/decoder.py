"""Llama 2/3.x, Qwen2/2.5 and Qwen3: one dense decoder, unaware of everything above it.

Maps (tokens, positions, attention plan) to hidden states, and hidden states to logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ssd_engine.attention.base import AttentionBackend, AttentionPlan
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.kvcache.cache import LayerCache
from ssd_engine.models.layer_ops import LayerOps, TorchOps
from ssd_engine.models.linear import Linear, Matrix, look_up, plain_linear
from ssd_engine.models.norm import make_norm
from ssd_engine.models.rope import RopeTable
from ssd_engine.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One rank's weights of a layer. Projections that read the same input are one matrix."""

    input_norm: Tensor  # [d]
    qkv: Matrix  # [(heads + 2 kv_heads) * head_dim, d]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    o: Matrix  # [d, heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [d]
    gate_up: Matrix  # [2 ff, d]
    gate_up_bias: Tensor | None
    down: Matrix  # [d, ff]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Matrix  # [embedding_rows, d], whole on every rank: a look-up needs no exchange
    layers: list[LayerWeights]
    norm: Tensor  # [d]
    head: Matrix  # [ceil(embedding_rows / ranks), d]; of tied embeddings a part of the embedding


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rope: RopeTable,
        attention: AttentionBackend,
        tp: TensorParallel,
        linear: Linear = plain_linear,
        ops: LayerOps | None = None,
    ) -> None:
        """``ops``: where a device has better ones than torch's."""
        self._linear = linear
        self.config = config
        self.weights = weights
        self.rope = rope
        self.attention = attention
        self.tp = tp
        self._norm = make_norm(config.rms_norm_eps, weights.norm.device)
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = config.kv_heads_per_rank(tp.size)
        qk_norm = make_norm(config.qk_norm_eps, weights.norm.device)
        self._ops = ops or TorchOps(rope, qk_norm, self.num_heads, self.num_kv_heads)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """tokens, positions, slots [rows] -> hidden states [rows, d], after the final norm."""
        places = self.places(positions)
        hidden = self.embed(tokens)
        for layer, cache in zip(self.weights.layers, caches, strict=True):
            projected = self.project(layer, hidden)
            attended = self.attend(layer, cache, projected, places, slots, plan)
            hidden = hidden + self.sum_ranks(self.multiply_o(layer, attended), layer.o_bias)
            gated = self.gate(layer, hidden)
            hidden = hidden + self.sum_ranks(self.multiply_down(layer, gated), layer.down_bias)
        return self.normalise(hidden)

    # One method for each operation of a layer, in their order.

    def places(self, positions: Tensor) -> Any:
        """What ``attend`` needs to know of the rows' positions."""
        return self._ops.places(positions)

    def embed(self, tokens: Tensor) -> Tensor:
        return look_up(self.weights.embedding, tokens).to(self.weights.norm.dtype)

    def project(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """[rows, (heads + 2 kv_heads) * head_dim]"""
        return self._linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)

    def attend(
        self,
        layer: LayerWeights,
        cache: LayerCache,
        projected: Tensor,
        places: Any,
        slots: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """[rows, heads * head_dim]; the new keys and values are in the cache then."""
        qkv = projected.view(projected.shape[0], -1, self.config.head_dim)
        query = self._ops.rotate_and_write(qkv, layer.qk_norm, cache, slots, places)
        return self.attention.attend(query, cache, plan)

    def multiply_o(self, layer: LayerWeights, attended: Tensor) -> Tensor:
        """This rank's part of a sum over ranks, each of which holds some input columns."""
        return self._linear(attended, layer.o, None)

    def gate(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        x = self._norm(hidden, layer.post_norm)
        return self._ops.gate(self._linear(x, layer.gate_up, layer.gate_up_bias))

    def multiply_down(self, layer: LayerWeights, gated: Tensor) -> Tensor:
        """As ``multiply_o``."""
        return self._linear(gated, layer.down, None)

    def sum_ranks(self, part: Tensor, bias: Tensor | None) -> Tensor:
        """The bias is added once, after the sum."""
        out = self.tp.all_reduce(part)
        return out if bias is None else out + bias

    def normalise(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden, self.weights.norm)

    def multiply_head(self, hidden: Tensor) -> Tensor:
        """[rows, this rank's tokens], from hidden states after the final norm."""
        return self._linear(hidden, self.weights.head, None)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, head_rows] float32 on rank 0; None on other ranks."""
        whole = self.tp.gather_columns(self.multiply_head(hidden))
        return None if whole is None else whole[:, : self.config.head_rows].float()
