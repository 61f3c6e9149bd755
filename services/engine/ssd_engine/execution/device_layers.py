"""The decoder's layers by fused products: one method for each operation."""

from collections.abc import Callable

import torch
from torch import Tensor

from ssd_engine.attention.base import AttentionPlan
from ssd_engine.execution.layer_products import LayerProducts, norm_after
from ssd_engine.kvcache.cache import KVCache, LayerCache
from ssd_engine.models.decoder import Decoder, LayerWeights

# (projected, layer, cache): [rows, heads * dim]; the new keys and values are in the cache then.
Attend = Callable[[Tensor, LayerWeights, LayerCache], Tensor]


class LayerBuffers:
    """The buffers that layers write to. Several ``Layers`` may share them: they run in turn."""

    def __init__(self, model: Decoder, rows: int) -> None:
        width, device = model.config.hidden_size, model.weights.norm.device
        first, dtype = model.weights.layers[0], model.weights.norm.dtype

        def room(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        self.hidden = room(width)
        self.projected = room(first.qkv.shape[0])
        self.gated = room(first.down.shape[1])
        self.summed = self.hidden if model.tp.size == 1 else room(width)


class Layers:
    """The operations of all layers, over some rows. A result stays until the next layer's."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        rows: int,
        products: LayerProducts,
        attend: Attend,
        buffers: LayerBuffers,
    ) -> None:
        """``rows``: with those that pad; the products know how many are computed."""
        self._model, self._kv = model, kv
        self._products, self._attend = products, attend
        self.alone = model.tp.size == 1
        self.hidden, self.projected = buffers.hidden[:rows], buffers.projected[:rows]
        self.gated, self.summed = buffers.gated[:rows], buffers.summed[:rows]
        # With more than two ranks the order of a sum may depend on its size: there is one for all.
        self._reduced = self.summed if model.tp.size <= 2 else buffers.summed

    def take(self, tokens: Tensor) -> None:
        """The embedding of the first rows."""
        rows = tokens.shape[0]
        torch.index_select(self._model.weights.embedding, 0, tokens, out=self.hidden[:rows])
        self._products.take(self.hidden, self._model.weights.layers[0].input_norm)

    def compute(self, numbers: range) -> None:
        for i in numbers:
            self.project(i)
            self.multiply_o(i, self.attend(i))
            self.add_o(i)
            self.gate(i)
            self.multiply_down(i)
            self.add_down(i)

    def project(self, i: int) -> None:
        """hidden -> projected"""
        self._products.project(i, self.hidden, self.projected)

    def attend(self, i: int) -> Tensor:
        """projected -> [rows, heads * dim]; the new keys and values are in the cache then."""
        return self._attend(self.projected, self._model.weights.layers[i], self._kv.layers[i])

    def multiply_o(self, i: int, attended: Tensor) -> None:
        """Onto the hidden states where there is one rank, else to ``summed``."""
        self._products.output(i, attended, self.summed)

    def add_o(self, i: int) -> None:
        """The sum over ranks, where there are several."""
        layer = self._model.weights.layers[i]
        self._sum_ranks(layer.o_bias, layer.post_norm)

    def gate(self, i: int) -> None:
        """hidden -> gated"""
        self._products.gate(i, self.hidden, self.gated)

    def multiply_down(self, i: int) -> None:
        """As ``multiply_o``."""
        self._products.down(i, self.gated, self.summed)

    def add_down(self, i: int) -> None:
        weights = self._model.weights
        self._sum_ranks(weights.layers[i].down_bias, norm_after(weights, i))

    def _sum_ranks(self, bias: Tensor | None, norm: Tensor) -> None:
        """Each rank holds some input columns; the bias is added once, after the sum."""
        if self.alone:
            return
        self.hidden += self._model.tp.all_reduce(self._reduced)[: len(self.hidden)]
        if bias is not None:
            self.hidden += bias
        self._products.take(self.hidden, norm)


class PromptLayers(Layers):
    """The layers of a prefill: they have as many rows as its prompts have tokens."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        products: LayerProducts,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        most_rows: int = 0,
    ) -> None:
        """``most_rows``: of any prefill."""
        places, rows = model.places(positions), tokens.shape[0]
        buffers = LayerBuffers(model, rows if model.tp.size <= 2 else max(rows, most_rows))

        def attend(projected: Tensor, layer: LayerWeights, cache: LayerCache) -> Tensor:
            return model.attend(layer, cache, projected, places, slots, plan)

        super().__init__(model, kv, rows, products, attend, buffers)
        self._tokens = tokens

    def embed(self) -> None:
        self.take(self._tokens)

    def forward(self) -> Tensor:
        """Hidden states [rows, d], before the final norm."""
        self.embed()
        self.compute(range(len(self._kv.layers)))
        return self.hidden
