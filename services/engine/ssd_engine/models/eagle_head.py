"""An EAGLE-3 head: layers that read the target's hidden states beside the token that follows them.

    g_j = fc(features of the target at j)           where the target has told them
    g_j = the head's own output at j - 1            where it has not: it goes on by itself
    row j reads token j + 1 and g_j, and its output tells token j + 2

So a head has a row less than its target has tokens. What it computes is a decoder's; only the
input of its first layer is another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_engine.attention.base import AttentionBackend
from ssd_engine.checkpoints.heads.head_config import FeatureNorm, HeadConfig
from ssd_engine.models.decoder import Decoder, DecoderWeights
from ssd_engine.models.layer_ops import LayerOps
from ssd_engine.models.layers import EagerProducts
from ssd_engine.models.linear import Linear, Matrix, plain_linear
from ssd_engine.models.rope import RopeTable
from ssd_engine.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class HeadWeights:
    decoder: DecoderWeights  # the first layer's attention_norm is of the embedding
    fc: Matrix  # [d, features]
    feature_norms: list[Tensor]  # of each boundary, or of all of them together
    state_norm: Tensor  # [d], of g
    target_tokens: Tensor | None  # [draft tokens]; None: every token is its own


class HeadStates:
    """What each row hands to the row after it, by the slots of the cache."""

    def __init__(self) -> None:
        self.rows = torch.empty(0)  # [slots, d]

    def allocate(self, slots: int, like: Tensor) -> None:
        """As wide as the norm that ``like`` is."""
        self.rows = like.new_zeros(slots, len(like))


class EagleHead(Decoder):
    def __init__(
        self,
        head: HeadConfig,
        weights: HeadWeights,
        rope: RopeTable,
        attention: AttentionBackend,
        tp: TensorParallel,
        num_tokens: int,
        linear: Linear = plain_linear,
        ops: LayerOps | None = None,
    ) -> None:
        """``num_tokens`` of the target: its padding is never drafted."""
        super().__init__(head.layers, weights.decoder, rope, attention, tp, linear, ops)
        self.head, self.head_weights, self.num_tokens = head, weights, num_tokens
        self._tokens = _drafted(weights.target_tokens, head.draft_vocab_size, num_tokens)

    def combine(self, features: Tensor) -> Tensor:
        """g [rows, d] of features [rows, boundaries * target's hidden size]."""
        norms = self.head_weights.feature_norms
        if self.head.feature_norm is FeatureNorm.WHOLE:
            features = self.norm(features, norms[0])
        elif self.head.feature_norm is FeatureNorm.EACH:
            parts = features.chunk(len(norms), dim=-1)
            normed = [self.norm(part, norm) for part, norm in zip(parts, norms, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.linear(features, self.head_weights.fc, None)

    def following_states(self, hidden: Tensor) -> Tensor:
        """g [rows, d] of the rows after these, where the target has not told its features."""
        return self.normalise(hidden) if self.head.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[rows, tokens of the target] float32; -inf for those that are never drafted."""
        drafted = self.tp.gather_columns(self.multiply_head(hidden))
        if drafted is None:
            return None
        whole = drafted.new_full((len(drafted), self.num_tokens), float("-inf"), dtype=torch.float)
        return self.spread(drafted, whole)

    def spread(self, drafted: Tensor, whole: Tensor) -> Tensor:
        """Logits of its own tokens [rows, draft tokens] to ``whole`` [rows, tokens of the target],
        whose others stay as they are."""
        if self._tokens is None:
            return whole.copy_(drafted[:, : self.num_tokens])
        places, tokens = self._tokens
        return whole.index_copy_(1, tokens, drafted[:, places].float())


class HeadProducts(EagerProducts):
    """The first layer reads embedding and g, each with a norm of its own, side by side."""

    def __init__(self, model: EagleHead, states: Tensor) -> None:
        """``states``: g [rows, d]."""
        super().__init__(model)
        self._head, self._states = model, states

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer adds to; its inputs are remembered."""
        head, layer = self._head, self._head.weights.layers[0]
        normed = head.norm(self._states, head.head_weights.state_norm)
        embedded = head.norm(head.embed(tokens), layer.attention_norm)
        self._inputs = torch.cat((embedded, normed), dim=-1)
        # A copy: what is added to it later is no state.
        return normed if head.head.norm_before_residual else self._states.clone()

    def project(self, i: int, hidden: Tensor) -> Tensor:
        if i:
            return super().project(i, hidden)
        layer = self._head.weights.layers[0]
        return self._head.linear(self._inputs, layer.qkv, layer.qkv_bias)


def _drafted(
    target_tokens: Tensor | None, num_drafted: int, num_tokens: int
) -> tuple[Tensor, Tensor] | None:
    """Places in the head's vocabulary and their tokens, without padding; None: all, in order."""
    if target_tokens is None:
        return None
    places = (target_tokens < num_tokens).nonzero().flatten()
    return places, target_tokens[places]
