"""The products of a decoder's layers on a CUDA device, over the rows of one shape.

Two ways: each by itself, from hidden states to what it gives; or as a chain, where what adds to the
hidden states also prepares them for the norm that follows.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Generic, TypeVar

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
from ssd_engine.models.decoder import Decoder

Kind = TypeVar("Kind")  # of product


class LayerBuffers:
    """The buffers that layers write to. Several products may share them: they run in turn."""

    def __init__(self, model: Decoder, rows: int) -> None:
        width, device = model.config.hidden_size, model.weights.norm.device
        first, dtype = model.weights.layers[0], model.weights.norm.dtype

        def room(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        self.hidden = room(width)
        self.projected = room(first.qkv.shape[0])
        self.gated = room(first.down.shape[1])
        self.part = self.hidden if fuses_residual(model) else room(width)


def fuses_residual(model: Decoder) -> bool:
    """Whether a product is added to the hidden states by itself: there is nothing in between."""
    return model.tp.size == 1 and model.weights.layers[0].attention_output_norm is None


def make_layer_products(
    model: Decoder, rows: int, kernels: KernelSet, buffers: LayerBuffers, padded: int = 0
) -> "SeparateProducts | ChainedProducts":
    """``padded``: rows with those that pad."""
    kind = ChainedProducts if chains_products(model, kernels) else SeparateProducts
    return kind(model, rows, kernels, buffers, padded or rows)


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
    first, onto = model.weights.layers[0], fuses_residual(model)
    before, between = first.attention_norm is not None, first.mlp_norm is not None

    def shape(weight: Tensor, bias: Tensor | None, **fused: bool) -> ProductShape:
        n, k = weight.shape
        return ProductShape(n, k, rows, bias=bias is not None, **fused)

    return [
        shape(first.qkv, first.qkv_bias, norm=before),
        shape(first.o, first.o_bias if onto else None, residual=onto),
        shape(first.gate_up, first.gate_up_bias, norm=between, gated=True),
        shape(first.down, first.down_bias if onto else None, residual=onto),
    ]


def head_shape(model: Decoder, rows: int) -> ProductShape:
    n, k = model.weights.head.shape
    return ProductShape(n, k, rows, norm=True, wide=True)


class FusedProducts(ABC, Generic[Kind]):
    """Products that write to buffers, which stay where they are."""

    def __init__(
        self, model: Decoder, rows: int, kernels: KernelSet, buffers: LayerBuffers, padded: int
    ) -> None:
        self._device, self._dtype = model.weights.norm.device, model.weights.norm.dtype
        self._weights, self._eps = model.weights, model.config.rms_norm_eps
        self._rows, self._kernels, self._head_shape = rows, kernels, head_shape(model, rows)
        self._hidden, self._projected = buffers.hidden[:padded], buffers.projected[:padded]
        self._gated, self._part = buffers.gated[:padded], buffers.part[:padded]
        self._onto = fuses_residual(model)
        products = [self._make(shape) for shape in layer_shapes(model, rows)]
        self._qkv, self._o, self._gate_up, self._down = products

    def embed(self, tokens: Tensor) -> Tensor:
        torch.index_select(self._weights.embedding, 0, tokens, out=self._hidden[: len(tokens)])
        return self._hidden

    def take(self, hidden: Tensor, norm: Tensor | None) -> None:
        """Every product that needs them reads them itself."""

    def project(self, i: int, hidden: Tensor) -> Tensor:
        layer, out = self._weights.layers[i], self._projected
        self._multiply(self._qkv, layer.qkv, hidden, out, layer.attention_norm, layer.qkv_bias)
        return out

    def multiply_o(self, i: int, attended: Tensor, hidden: Tensor) -> Tensor | None:
        layer = self._weights.layers[i]
        return self._add(self._o, layer.o, attended, layer.o_bias, layer.mlp_norm)

    def gate(self, i: int, hidden: Tensor) -> Tensor:
        layer, out = self._weights.layers[i], self._gated
        norm, bias = layer.mlp_norm, layer.gate_up_bias
        self._multiply(self._gate_up, layer.gate_up, hidden, out, norm, bias)
        return out

    def multiply_down(self, i: int, gated: Tensor, hidden: Tensor) -> Tensor | None:
        layer = self._weights.layers[i]
        return self._add(
            self._down, layer.down, gated, layer.down_bias, self._weights.norm_after(i)
        )

    @abstractmethod
    def _make(self, shape: ProductShape) -> Kind: ...

    @abstractmethod
    def _multiply(
        self,
        product: Kind,
        weight: Tensor,
        hidden: Tensor,
        out: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        """The product of the hidden states, after their norm, goes to ``out``."""

    @abstractmethod
    def _add(
        self,
        product: Kind,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        next_norm: Tensor | None,
    ) -> Tensor | None:
        """Adds to the hidden states where nothing is in between; else returns a part of a sum."""


class SeparateProducts(FusedProducts[Product]):
    @cached_property
    def _head(self) -> Product:
        return self._make(self._head_shape)

    def score(self, hidden: Tensor, out: Tensor) -> None:
        self._head(self._weights.head, hidden, out, self._weights.norm, self._eps)

    def _make(self, shape: ProductShape) -> Product:
        return make_product(shape, self._dtype, self._device, self._kernels)

    def _multiply(
        self,
        product: Product,
        weight: Tensor,
        hidden: Tensor,
        out: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        product(weight, hidden, out, norm, self._eps, bias)

    def _add(
        self,
        product: Product,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        next_norm: Tensor | None,
    ) -> Tensor | None:
        product(weight, x, self._part, bias=bias if self._onto else None)
        return None if self._onto else self._part


class ChainedProducts(FusedProducts[StreamedProduct]):
    @cached_property
    def _normed(self) -> NormedRows:
        return NormedRows(self._rows, self._hidden.shape[1], self._device, self._kernels.overlap)

    @cached_property
    def _head(self) -> StreamedProduct | Product:
        """Made on first use: prompts do without it."""
        if fits(self._head_shape):
            return self._make(self._head_shape)
        return make_product(self._head_shape, self._dtype, self._device, self._kernels)

    def take(self, hidden: Tensor, norm: Tensor | None) -> None:
        if norm is not None:
            self._normed.take(hidden[: self._rows], norm)

    def score(self, hidden: Tensor, out: Tensor) -> None:
        head, norm = self._weights.head, self._weights.norm
        if isinstance(self._head, StreamedProduct):
            self._head.normed(head, self._normed, out, self._eps)
        else:
            self._head(head, hidden, out, norm, self._eps)

    def _make(self, shape: ProductShape) -> StreamedProduct:
        return StreamedProduct(shape, self._kernels, self._device)

    def _multiply(
        self,
        product: StreamedProduct,
        weight: Tensor,
        hidden: Tensor,
        out: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        if norm is None:
            product.plain(weight, hidden, out, bias)
        else:
            product.normed(weight, self._normed, out, self._eps, bias)

    def _add(
        self,
        product: StreamedProduct,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        next_norm: Tensor | None,
    ) -> Tensor | None:
        if not self._onto or next_norm is None:
            product.plain(weight, x, self._part)
            return self._part
        product.onto(weight, x, self._hidden, bias, next_norm, self._normed)
        return None
