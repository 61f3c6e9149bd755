"""The products of a decoder's layers, over the rows of one shape.

Two ways: each by itself, from hidden states to what it gives; or as a chain, where what adds to the
hidden states also prepares them for the norm that follows.
"""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kernels.products.products import Product, make_product
from ssd_engine.kernels.products.streamed_products import (
    WIDTHS,
    NormedRows,
    StreamedProduct,
    fits,
    streamed_kernel,
)
from ssd_engine.models.decoder import Decoder, DecoderWeights


class LayerProducts(Protocol):
    """Operations of layer ``i``. Where there is one rank, ``output`` and ``down`` add to the hidden
    states; else they write this rank's part of a sum."""

    def take(self, hidden: Tensor, norm: Tensor) -> None:
        """The hidden states were changed by others; ``norm`` comes next."""
        ...

    def project(self, i: int, hidden: Tensor, out: Tensor) -> None: ...

    def output(self, i: int, attended: Tensor, out: Tensor) -> None: ...

    def gate(self, i: int, hidden: Tensor, out: Tensor) -> None: ...

    def down(self, i: int, gated: Tensor, out: Tensor) -> None: ...

    def score(self, hidden: Tensor, out: Tensor) -> None: ...


def make_layer_products(model: Decoder, rows: int, kernels: KernelSet) -> LayerProducts:
    if chains_products(model, kernels):
        return ChainedProducts(model, rows, kernels)
    return SeparateProducts(model, rows, kernels)


def chains_products(model: Decoder, kernels: KernelSet) -> bool:
    """Whether a layer's products can be chained. The head, which has as many outputs as there are
    tokens, may have a product of another kind."""
    layer = layer_shapes(model, 1)
    return kernels.streams(model.weights.norm.dtype) and all(map(fits, layer))


def compile_chained(model: Decoder, kernels: KernelSet) -> None:
    """Begins to compile what prompts need, for every number of rows that they may have."""
    for width in WIDTHS:
        for shape in layer_shapes(model, width):
            streamed_kernel(shape, kernels, model.weights.norm.device)


def layer_shapes(model: Decoder, rows: int) -> list[ProductShape]:
    """The projection, the output, the gates and the down projection of a layer."""
    first, alone = model.weights.layers[0], model.tp.size == 1

    def shape(weight: Tensor, bias: Tensor | None, **fused: bool) -> ProductShape:
        n, k = weight.shape
        return ProductShape(n, k, rows, bias=bias is not None, **fused)

    return [
        shape(first.qkv, first.qkv_bias, norm=True),
        shape(first.o, first.o_bias if alone else None, residual=alone),
        shape(first.gate_up, first.gate_up_bias, norm=True, gated=True),
        shape(first.down, first.down_bias if alone else None, residual=alone),
    ]


def head_shape(model: Decoder, rows: int) -> ProductShape:
    n, k = model.weights.head.shape
    return ProductShape(n, k, rows, norm=True, wide=True)


class SeparateProducts:
    def __init__(self, model: Decoder, rows: int, kernels: KernelSet) -> None:
        self._weights, self._eps = model.weights, model.config.rms_norm_eps
        self._alone = model.tp.size == 1
        device, dtype = model.weights.norm.device, model.weights.norm.dtype
        shapes = [*layer_shapes(model, rows), head_shape(model, rows)]
        products = [make_product(shape, dtype, device, kernels) for shape in shapes]
        self._qkv, self._o, self._gate_up, self._down, self._head = products

    def take(self, hidden: Tensor, norm: Tensor) -> None:
        """Every product that needs them reads them itself."""

    def project(self, i: int, hidden: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._qkv(layer.qkv, hidden, out, layer.input_norm, self._eps, layer.qkv_bias)

    def output(self, i: int, attended: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._add(self._o, layer.o, attended, out, layer.o_bias)

    def gate(self, i: int, hidden: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._gate_up(layer.gate_up, hidden, out, layer.post_norm, self._eps, layer.gate_up_bias)

    def down(self, i: int, gated: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._add(self._down, layer.down, gated, out, layer.down_bias)

    def score(self, hidden: Tensor, out: Tensor) -> None:
        self._head(self._weights.head, hidden, out, self._weights.norm, self._eps)

    def _add(
        self, product: Product, weight: Tensor, x: Tensor, out: Tensor, bias: Tensor | None
    ) -> None:
        product(weight, x, out, bias=bias if self._alone else None)


class ChainedProducts:
    def __init__(self, model: Decoder, rows: int, kernels: KernelSet) -> None:
        self._weights, self._eps = model.weights, model.config.rms_norm_eps
        self._alone = model.tp.size == 1
        device: torch.device = model.weights.norm.device
        self._rows = rows
        shapes = layer_shapes(model, rows)
        products = [StreamedProduct(shape, kernels, device) for shape in shapes]
        self._qkv, self._o, self._gate_up, self._down = products
        self._kernels, self._head_shape = kernels, head_shape(model, rows)
        width = model.config.hidden_size
        self._normed = NormedRows(self._rows, width, device, kernels.overlap)

    def take(self, hidden: Tensor, norm: Tensor) -> None:
        self._normed.take(hidden[: self._rows], norm)

    def project(self, i: int, hidden: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._qkv.normed(layer.qkv, self._normed, out, self._eps, layer.qkv_bias)

    def output(self, i: int, attended: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._add(self._o, layer.o, attended, out, layer.o_bias, layer.post_norm)

    def gate(self, i: int, hidden: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._gate_up.normed(layer.gate_up, self._normed, out, self._eps, layer.gate_up_bias)

    def down(self, i: int, gated: Tensor, out: Tensor) -> None:
        layer = self._weights.layers[i]
        self._add(self._down, layer.down, gated, out, layer.down_bias, norm_after(self._weights, i))

    def score(self, hidden: Tensor, out: Tensor) -> None:
        head, norm = self._weights.head, self._weights.norm
        if isinstance(self._head, StreamedProduct):
            self._head.normed(head, self._normed, out, self._eps)
        else:
            self._head(head, hidden, out, norm, self._eps)

    @cached_property
    def _head(self) -> StreamedProduct | Product:
        """Made on first use: prompts do without it."""
        shape, norm = self._head_shape, self._weights.norm
        if fits(shape):
            return StreamedProduct(shape, self._kernels, norm.device)
        return make_product(shape, norm.dtype, norm.device, self._kernels)

    def _add(
        self,
        product: StreamedProduct,
        weight: Tensor,
        x: Tensor,
        out: Tensor,
        bias: Tensor | None,
        norm: Tensor,
    ) -> None:
        if self._alone:
            product.onto(weight, x, out, bias, norm, self._normed)
        else:
            product.plain(weight, x, out)


def norm_after(weights: DecoderWeights, i: int) -> Tensor:
    """The norm that follows layer ``i``."""
    is_last = i + 1 == len(weights.layers)
    return weights.norm if is_last else weights.layers[i + 1].input_norm
