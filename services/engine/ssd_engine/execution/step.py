"""One forward over a few rows of several sequences, from tokens to what is drawn after them.

The decoder's layers with fused kernels, over buffers that stay where they are, so that all of it
can be captured: the inputs' copy to the device first, the results' copy back last.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ssd_engine.execution.layer_products import (
    ChainedProducts,
    LayerBuffers,
    SeparateProducts,
    make_layer_products,
)
from ssd_engine.execution.step_attention import make_attention
from ssd_engine.execution.step_drawing import StepDrawing
from ssd_engine.execution.step_features import StepFeatures
from ssd_engine.forward.batch import Drawing
from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kernels.elementwise import move_kernel
from ssd_engine.kernels.kernel_set import INTERPRETED, KernelSet
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.kernels.sampling.drawing import follow_kernel
from ssd_engine.kvcache.cache import KVCache
from ssd_engine.models.decoder import Decoder
from ssd_engine.models.layers import Layers

LEADING_LAYERS = 3


class StepBuffers(LayerBuffers):
    """The buffers that all steps of a server write to, as large as the largest step needs."""

    def __init__(self, model: Decoder, largest: StepShape) -> None:
        super().__init__(model, largest.padded_rows)
        device, head = model.weights.norm.device, model.weights.head
        self.logits = torch.zeros(largest.rows, head.shape[0], device=device)


class StepLayers(Layers):
    """The layers over the rows of one step shape, whose inputs lie on the device."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        inputs: StepInputs,
        kernels: KernelSet,
        largest: StepShape | None = None,
        buffers: "StepBuffers | None" = None,
    ) -> None:
        """``largest``: of the shapes that must give a row the same bits."""
        shape = inputs.shape
        buffers = buffers or StepBuffers(model, shape)
        self._fused = self._make_products(model, inputs, kernels, buffers)
        attend = make_attention(model, inputs, kernels, largest or shape)
        super().__init__(model, kv, self._fused, attend, inputs["tokens"][: shape.rows])
        self.logits = buffers.logits[: shape.rows]

    def _make_products(
        self, model: Decoder, inputs: StepInputs, kernels: KernelSet, buffers: "StepBuffers"
    ) -> SeparateProducts | ChainedProducts:
        shape = inputs.shape
        return make_layer_products(model, shape.rows, kernels, buffers, shape.padded_rows)

    def move(self) -> None:
        """Beside keys and values nothing is kept."""

    def begin(self) -> None:
        """The embedding, and the first layers."""
        self.embed()
        self.compute(range(len(self._kv.layers))[:LEADING_LAYERS])

    def finish(self) -> Tensor | None:
        """Logits [rows, head_rows] float32 on rank 0; None elsewhere."""
        self.compute(range(len(self._kv.layers))[LEADING_LAYERS:])
        self.score()
        return self._model.tp.gather_columns(self.logits)

    def score(self) -> None:
        """hidden -> logits, of this rank's tokens"""
        self._fused.score(self.hidden, self.logits)


# (model, kv, inputs, kernels, largest, buffers)
MakeLayers = Callable[
    [Any, KVCache, StepInputs, KernelSet, StepShape | None, StepBuffers | None], StepLayers
]


class Step(StepDrawing):
    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        shape: StepShape,
        ranks: int,
        kernels: KernelSet = INTERPRETED,
        last: Tensor | None = None,
        num_sides: int = 1,
        histories: Histories | None = None,
        largest: StepShape | None = None,
        buffers: StepBuffers | None = None,
        make_layers: MakeLayers = StepLayers,
    ) -> None:
        """``kv`` may be allocated later, before the first run. ``last``: what each row draws, or
        its best token: the step after this one may follow. With two sides a step can be filled
        while the one before it is in flight. ``histories``: for penalties and bias, where rows have
        any. ``largest``: of the shapes that must give a row the same bits. ``buffers``: those that
        steps share."""
        vocab, device = model.config.head_rows, model.weights.norm.device
        super().__init__(shape, vocab, device, ranks, kernels.overlap, last, num_sides, histories)
        self.follows, self._last = last is not None, last
        self.layers = make_layers(model, kv, self.inputs, kernels, largest, buffers)
        self._kv = kv
        self._features: StepFeatures | None = None
        self.logits: Tensor | None = None

    def watch(self, features: StepFeatures | None) -> None:
        """From now on each run tells ``features`` its residual stream; None: nobody reads it."""
        self._features = features
        self.use(self._side)

    def use(self, side: int) -> None:
        super().use(side)
        self.layers.tap = None if self._features is None else self._features.taps[side]

    def run(self, drawing: Drawing = Drawing.PLAIN) -> None:
        """All of it, over fixed addresses, so that it can be captured."""
        self.compute()
        self.finish(drawing)

    def compute(self) -> None:
        """All but what is drawn."""
        self.begin()
        self.score()

    def begin(self) -> None:
        """As much as keeps a device busy until the rest of it is launched, too."""
        self.inputs.copy()
        if self._last is not None:
            self._follow(self._last)
        if self.shape.moves:
            self.move()
        self.layers.begin()

    def score(self) -> None:
        self.logits = self.layers.finish()

    def finish(self, drawing: Drawing = Drawing.PLAIN) -> None:
        """Other ranks than the first have no logits."""
        if self.logits is None:
            return
        self.draw(self.logits, drawing)
        self.fetch(drawing)

    def _follow(self, last: Tensor) -> None:
        rows = self.shape.rows
        follow_kernel[(1,)](self.inputs["tokens"], last, rows, triton.next_power_of_2(rows))

    def move(self) -> None:
        """Keys and values of taken branches to where they belong."""
        pool = self._kv.pool
        width, slots = pool.shape[-1] * pool.shape[-2], pool.shape[1] * pool.shape[2]
        move_kernel[(self.shape.moves, pool.shape[0])](
            pool,
            self.inputs["sources"],
            self.inputs["targets"],
            self.inputs["num_moves"],
            slots,
            width,
            triton.next_power_of_2(width),
            False,
        )
        self.layers.move()
