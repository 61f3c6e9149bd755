"""One dense decoder, unaware of everything above it: its weights, and what its layers share.

``layers.py`` has the layers themselves.
"""

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

    attention_norm: Tensor | None  # [d], before attention
    qkv: Matrix  # [(heads + 2 kv_heads) * head_dim, d]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], of each head by itself
    projection_norm: Tensor | None  # [(heads + kv_heads) * head_dim], of all heads together
    o: Matrix  # [d, heads * head_dim]
    o_bias: Tensor | None
    attention_output_norm: Tensor | None  # [d]
    mlp_norm: Tensor | None  # [d], before the MLP
    gate_up: Matrix  # [2 ff, d]
    gate_up_bias: Tensor | None
    down: Matrix  # [d, ff]
    down_bias: Tensor | None
    mlp_output_norm: Tensor | None  # [d]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Matrix  # [embedding_rows, d], whole on every rank: a look-up needs no exchange
    layers: list[LayerWeights]
    norm: Tensor  # [d]
    head: Matrix  # [ceil(embedding_rows / ranks), d]; of tied embeddings a part of the embedding

    def norm_after(self, i: int) -> Tensor | None:
        """The norm before what follows layer ``i``."""
        return self.norm if i + 1 == len(self.layers) else self.layers[i + 1].attention_norm


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
        self.config = config
        self.weights = weights
        self.rope = rope
        self.attention = attention
        self.tp = tp
        self.linear = linear
        device = weights.norm.device
        self.norm = make_norm(config.rms_norm_eps, device)
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = config.kv_heads_per_rank(tp.size)
        qk_norm = make_norm(config.qk_norm_eps, device)
        self.ops = ops or TorchOps(rope, qk_norm, self.num_heads, self.num_kv_heads)
        # With more ranks than KV heads, each head is in as many sums over ranks.
        heads = self.num_heads * tp.size, self.num_kv_heads * tp.size
        self._qk_widths = heads[0] * config.head_dim, heads[1] * config.head_dim

    def embed(self, tokens: Tensor) -> Tensor:
        return look_up(self.weights.embedding, tokens).to(self.weights.norm.dtype)

    def normalise_qk(self, projected: Tensor, norm: Tensor) -> None:
        """Queries and keys in their place, each by all heads of all ranks."""
        sums = self.tp.all_reduce(self.ops.square_sums(projected))
        self.ops.scale_qk(projected, norm, sums, self._qk_widths, self.config.qk_norm_eps)

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
        query = self.ops.rotate_and_write(qkv, layer.qk_norm, cache, slots, places)
        return self.attention.attend(query, cache, plan)

    def normalise(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, self.weights.norm)

    def multiply_head(self, hidden: Tensor) -> Tensor:
        """[rows, this rank's tokens], from hidden states after the final norm."""
        return self.linear(hidden, self.weights.head, None)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, head_rows] float32 on rank 0; None on other ranks."""
        whole = self.tp.gather_columns(self.multiply_head(hidden))
        return None if whole is None else whole[:, : self.config.head_rows].float()
