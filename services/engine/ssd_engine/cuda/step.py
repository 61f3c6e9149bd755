"""One forward over a few rows of several sequences, from tokens to what is drawn after them.

The decoder's layers with fused kernels, over buffers that stay where they are, so that all of it
can be captured: the inputs' copy to the device first, the results' copy back last.
"""

import torch
import triton
from torch import Tensor

from ssd_engine.batch import Drawing
from ssd_engine.cuda.adjusting import Histories
from ssd_engine.cuda.drawing import follow_kernel
from ssd_engine.cuda.elementwise import move_kernel
from ssd_engine.cuda.kernel_set import INTERPRETED, KernelSet
from ssd_engine.cuda.layer_products import make_layer_products, norm_after
from ssd_engine.cuda.step_attention import make_attention
from ssd_engine.cuda.step_drawing import StepDrawing
from ssd_engine.cuda.step_inputs import StepInputs, StepShape
from ssd_engine.decoder import Decoder
from ssd_engine.kv_cache import KVCache

LEADING_LAYERS = 3


class StepLayers:
    """The decoder's layers over the rows of one shape, one method for each operation.

    What an operation leaves behind stays until the same one of the next layer.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        inputs: StepInputs,
        kernels: KernelSet,
        largest: StepShape | None = None,
    ) -> None:
        """``largest``: of the shapes that must give a row the same bits."""
        self._model, self._kv, self._inputs = model, kv, inputs
        config, shape = model.config, inputs.shape
        device, dtype = model.weights.norm.device, model.weights.norm.dtype
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, config.head_dim
        rows, self.alone = shape.rows, model.tp.size == 1

        def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        self._products = make_layer_products(model, rows, kernels)
        padded = shape.padded_rows
        self.hidden = empty(padded, config.hidden_size)
        self.projected = empty(padded, (heads + 2 * kv_heads) * dim)
        self.gated = empty(padded, model.weights.layers[0].down.shape[1])
        self.summed = self.hidden if self.alone else empty(padded, config.hidden_size)
        self.logits = empty(rows, model.weights.head.shape[0], kind=torch.float32)
        self._attend = make_attention(model, inputs, kernels, largest or shape)

    def begin(self) -> None:
        """The embedding, and the first layers."""
        self.embed()
        self._compute(range(len(self._kv.layers))[:LEADING_LAYERS])

    def finish(self) -> Tensor | None:
        """Logits [rows, head_rows] float32 on rank 0; None elsewhere."""
        self._compute(range(len(self._kv.layers))[LEADING_LAYERS:])
        self.score()
        return self._model.tp.gather_columns(self.logits)

    def _compute(self, numbers: range) -> None:
        for i in numbers:
            self.project(i)
            self.multiply_o(i, self.attend(i))
            self.add_o(i)
            self.gate(i)
            self.multiply_down(i)
            self.add_down(i)

    def embed(self) -> None:
        rows = self._inputs.shape.rows
        tokens = self._inputs["tokens"][:rows]
        torch.index_select(self._model.weights.embedding, 0, tokens, out=self.hidden[:rows])
        self._products.take(self.hidden, self._model.weights.layers[0].input_norm)

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

    def score(self) -> None:
        """hidden -> logits, of this rank's tokens"""
        self._products.score(self.hidden, self.logits)

    def _sum_ranks(self, bias: Tensor | None, norm: Tensor) -> None:
        """Each rank holds some input columns; the bias is added once, after the sum."""
        if self.alone:
            return
        self.hidden += self._model.tp.all_reduce(self.summed)
        if bias is not None:
            self.hidden += bias
        self._products.take(self.hidden, norm)


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
    ) -> None:
        """``kv`` may be allocated later, before the first run. ``last``: what each row draws, or
        its best token: the step after this one may follow. With two sides a step can be filled
        while the one before it is in flight. ``histories``: for penalties and bias, where rows have
        any. ``largest``: of the shapes that must give a row the same bits."""
        vocab, device = model.config.head_rows, model.weights.norm.device
        super().__init__(shape, vocab, device, ranks, kernels.overlap, last, num_sides, histories)
        self.follows, self._last = last is not None, last
        self.layers = StepLayers(model, kv, self.inputs, kernels, largest)
        self._kv = kv
        self.logits: Tensor | None = None

    def run(self, drawing: Drawing = Drawing.PLAIN) -> None:
        """All of it, over fixed addresses, so that it can be captured."""
        self.begin()
        self.score()
        self.finish(drawing)

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
