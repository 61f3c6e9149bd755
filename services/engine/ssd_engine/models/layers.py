"""The layers of a decoder, over the rows of one forward: one definition for every device.

A family decides which norms a layer has. A device decides how products are computed and where their
results go: ``LayerProducts``. A result stays until the next layer's.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ssd_engine.attention.base import AttentionPlan
from ssd_engine.kvcache.cache import KVCache, LayerCache
from ssd_engine.models.decoder import Decoder, LayerWeights
from ssd_engine.models.features import FeatureTap
from ssd_engine.models.linear import Matrix

# (projected, layer, cache): [rows, heads * dim]; the new keys and values are in the cache then.
Attend = Callable[[Tensor, LayerWeights, LayerCache], Tensor]


class LayerProducts(Protocol):
    """Products of layer ``i``, each with the norm that comes before it."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The hidden states before the first layer."""

    def take(self, hidden: Tensor, norm: Tensor | None) -> None:
        """The hidden states were changed by others; ``norm``, if there is one, comes next."""

    def project(self, i: int, hidden: Tensor) -> Tensor:
        """[rows, (heads + 2 kv_heads) * head_dim]"""

    def multiply_o(self, i: int, attended: Tensor, hidden: Tensor) -> Tensor | None:
        """This rank's part of a sum over ranks, each of which holds some input columns; None where
        it has been added to the hidden states."""

    def gate(self, i: int, hidden: Tensor) -> Tensor:
        """[rows, ff of this rank]"""

    def multiply_down(self, i: int, gated: Tensor, hidden: Tensor) -> Tensor | None:
        """As ``multiply_o``."""


class Layers:
    hidden: Tensor  # [rows or more, d]
    projected: Tensor
    attended: Tensor
    gated: Tensor
    part: Tensor | None  # of a sum over ranks
    tap: FeatureTap | None = None  # is told the hidden states at every boundary

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        products: LayerProducts,
        attend: Attend,
        tokens: Tensor,
    ) -> None:
        self._model, self._kv = model, kv
        self._weights = model.weights.layers
        self._products, self._attend, self._tokens = products, attend, tokens

    def compute(self, numbers: range) -> None:
        """The operations of these layers, in their order."""
        for i in numbers:
            self.project(i)
            self.normalise_qk(i)
            self.attend(i)
            self.multiply_o(i)
            self.add_o(i)
            self.gate(i)
            self.multiply_down(i)
            self.add_down(i)

    def embed(self) -> None:
        self.hidden = self._products.embed(self._tokens)
        self._products.take(self.hidden, self._weights[0].attention_norm)
        self._tell(0)

    def project(self, i: int) -> None:
        self.projected = self._products.project(i, self.hidden)

    def normalise_qk(self, i: int) -> None:
        """Where a norm is over all heads together; that of each head is up to ``attend``."""
        norm = self._weights[i].projection_norm
        if norm is not None:
            self._model.normalise_qk(self.projected, norm)

    def attend(self, i: int) -> None:
        self.attended = self._attend(self.projected, self._weights[i], self._kv.layers[i])

    def multiply_o(self, i: int) -> None:
        self.part = self._products.multiply_o(i, self.attended, self.hidden)

    def add_o(self, i: int) -> None:
        layer = self._weights[i]
        self._add(layer.o_bias, layer.attention_output_norm, layer.mlp_norm)

    def gate(self, i: int) -> None:
        self.gated = self._products.gate(i, self.hidden)

    def multiply_down(self, i: int) -> None:
        self.part = self._products.multiply_down(i, self.gated, self.hidden)

    def add_down(self, i: int) -> None:
        layer = self._weights[i]
        self._add(layer.down_bias, layer.mlp_output_norm, self._model.weights.norm_after(i))
        self._tell(i + 1)

    def _tell(self, boundary: int) -> None:
        if self.tap is not None:
            self.tap(boundary, self.hidden)

    def _add(self, bias: Tensor | None, norm: Tensor | None, next_norm: Tensor | None) -> None:
        """The sum over ranks, with its bias and its norm, onto the hidden states."""
        if self.part is None:
            return
        whole = self._model.tp.all_reduce(self.part)[: len(self.hidden)]
        if bias is not None:
            whole = whole + bias
        if norm is not None:
            whole = self._model.norm(whole, norm)
        self.hidden += whole
        self._products.take(self.hidden, next_norm)


class PromptLayers(Layers):
    """The layers of a forward over any number of rows."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        products: LayerProducts,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
    ) -> None:
        places = model.ops.places(positions)

        def attend(projected: Tensor, layer: LayerWeights, cache: LayerCache) -> Tensor:
            return model.attend(layer, cache, projected, places, slots, plan)

        super().__init__(model, kv, products, attend, tokens)

    def forward(self) -> Tensor:
        """Hidden states [rows, d], before the final norm."""
        self.embed()
        self.compute(range(len(self._weights)))
        return self.hidden

    def forward_with_features(self, boundaries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Also the residual stream at these boundaries, side by side [rows, boundaries * d]."""
        norm, width = self._model.weights.norm, len(boundaries) * self._model.config.hidden_size
        self.tap = FeatureTap(boundaries, norm.new_empty(len(self._tokens), width))
        return self.forward(), self.tap.out


class EagerProducts:
    """Products by themselves, each with a result of its own."""

    def __init__(self, model: Decoder) -> None:
        self._model, self._weights = model, model.weights.layers

    def embed(self, tokens: Tensor) -> Tensor:
        return self._model.embed(tokens)

    def take(self, hidden: Tensor, norm: Tensor | None) -> None:
        """Every product that needs them reads them itself."""

    def project(self, i: int, hidden: Tensor) -> Tensor:
        layer = self._weights[i]
        return self._normed(hidden, layer.attention_norm, layer.qkv, layer.qkv_bias)

    def multiply_o(self, i: int, attended: Tensor, hidden: Tensor) -> Tensor:
        return self._model.linear(attended, self._weights[i].o, None)

    def gate(self, i: int, hidden: Tensor) -> Tensor:
        layer = self._weights[i]
        both = self._normed(hidden, layer.mlp_norm, layer.gate_up, layer.gate_up_bias)
        return self._model.ops.gate(both)

    def multiply_down(self, i: int, gated: Tensor, hidden: Tensor) -> Tensor:
        return self._model.linear(gated, self._weights[i].down, None)

    def _normed(
        self, hidden: Tensor, norm: Tensor | None, weight: Matrix, bias: Tensor | None
    ) -> Tensor:
        x = hidden if norm is None else self._model.norm(hidden, norm)
        return self._model.linear(x, weight, bias)
