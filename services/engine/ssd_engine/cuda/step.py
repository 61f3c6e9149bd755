"""One forward over a few rows of several sequences, from tokens to what is drawn after them.

The decoder's layers with fused kernels, over buffers that stay where they are, so that all of it
can be captured: the inputs' copy to the device first, the results' copy back last.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.batch import Draw, Drawing
from ssd_engine.cuda.adjusting import Histories
from ssd_engine.cuda.drawing import (
    LEAF,
    best_of_piece_kernel,
    follow_kernel,
    leaf_kernel,
    rank_kernel,
    verdict_kernel,
)
from ssd_engine.cuda.elementwise import move_kernel, overlapping
from ssd_engine.cuda.filtering import CUT, PIECE, Filters
from ssd_engine.cuda.kernel_set import INTERPRETED, KernelSet
from ssd_engine.cuda.layer_products import make_layer_products, norm_after
from ssd_engine.cuda.reporting import Reports
from ssd_engine.cuda.step_attention import make_attention
from ssd_engine.cuda.step_inputs import HistoryInputs, StepInputs, StepShape
from ssd_engine.decoder import Decoder
from ssd_engine.kv_cache import KVCache

LEAVES_AT_ONCE = PIECE // LEAF
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


class Step:
    """``ranks`` 1: what the rows draw, and how much of what they verify is right.

    More: the best ``ranks`` tokens of every row, for a draft's guesses.
    """

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
        """``kv`` may be allocated later, before the first run. ``last``: the best token of each
        row, which the step after this one may follow. With two sides a step can be filled while
        the one before it is in flight. ``histories``: for penalties and bias, where rows have
        any. ``largest``: of the shapes that must give a row the same bits."""
        device = model.weights.norm.device
        self.num_sides, self.follows = num_sides, last is not None
        self.inputs = StepInputs(shape, device, self.num_sides)
        self._last, self._histories = last, histories
        self._history_inputs = HistoryInputs(shape, device, self.num_sides)
        self.shape, self.ranks = shape, ranks
        # What it may be asked to do; the same on every rank.
        self.drawings = [each for each in Drawing if each < Drawing.REPORTED or ranks == 1]
        self.layers = StepLayers(model, kv, self.inputs, kernels, largest)
        self.head_rows = model.config.head_rows
        self._kv, self._overlap = kv, kernels.overlap
        self.logits: Tensor | None = None
        rows = shape.rows
        self.run_width = triton.next_power_of_2(shape.rows_per_run)
        self._pieces = -(-self.head_rows // PIECE)
        self._leaves = -(-self.head_rows // LEAF)
        self._filters = Filters(rows, self.head_rows, device, kernels.overlap)
        width = shape.runs * (1 + 2 * self.run_width) if ranks == 1 else rows * ranks
        self.drawn = torch.zeros(width, dtype=torch.int32, device=device)
        self._host_drawn = _host_sides(self.drawn, self.num_sides)
        self._side = 0
        if ranks == 1:
            self._best = torch.empty(rows, self._pieces, dtype=torch.float64, device=device)
            self._best_token = torch.empty(rows, self._pieces, dtype=torch.int32, device=device)
            self._broken = torch.empty(rows, self._pieces, dtype=torch.int32, device=device)
            self._reports = Reports(rows, self.head_rows, device, kernels.overlap)
            self._host_reported = _host_sides(self._reports.reported, self.num_sides)
        else:
            self._scores = torch.empty(rows, self._leaves * LEAF, device=device)
            self._bests = torch.empty(rows, self._leaves, device=device)
            self._best_of_row = torch.zeros(rows, dtype=torch.int32, device=device)
            if last is not None:
                self._best_of_row = last

    @property
    def host_drawn(self) -> Tensor:
        """What the last run on this side has drawn."""
        return self._host_drawn[self._side]

    def drawn_on(self, side: int) -> NDArray[np.int32]:
        drawn: NDArray[np.int32] = self._host_drawn[side].numpy()
        return drawn

    def reported_on(self, side: int) -> NDArray[np.int32]:
        """[rows, REPORT_WIDTH] of a step that has reported."""
        reported: NDArray[np.int32] = self._host_reported[side].numpy()
        return reported

    @property
    def reported(self) -> Tensor:
        return self._reports.reported

    def use(self, side: int) -> None:
        self._side = side
        self.inputs.use(side)
        self._history_inputs.use(side)

    def tell_histories(self, rows: Sequence[int], draws: Sequence[Draw | None]) -> None:
        """The last that an adjusted step is told, before it is launched. ``rows``: that draw so."""
        if self._histories is None:
            raise RuntimeError("a step without histories has none to be told")
        self._histories.tell(self._history_inputs, rows, draws)

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
        self.host_drawn.copy_(self.drawn, non_blocking=True)
        if drawing >= Drawing.REPORTED:
            self._host_reported[self._side].copy_(self.reported, non_blocking=True)

    def draw(self, logits: Tensor, drawing: Drawing = Drawing.PLAIN) -> None:
        """Tokens, or the best of every row, to ``drawn``. The logits stay as they are."""
        adjusted = logits
        if drawing >= Drawing.ADJUSTED and self._histories is not None:
            tokens = self.inputs["tokens"]
            adjusted = self._histories.adjust(logits, tokens, self._history_inputs)
        filtered = drawing >= Drawing.FILTERED
        if filtered:
            names = ("temperatures", "top_k", "top_p", "log_min_p")
            self._filters.find(adjusted, *(self.inputs[name] for name in names))
        (self._draw if self.ranks == 1 else self._rank)(adjusted, filtered)
        if drawing >= Drawing.REPORTED:
            self._reports.make(logits, self._best, self._best_token)

    def _cuts(self, filtered: bool) -> dict[str, Any]:
        """What the kernels are told of the filters."""
        filters = self._filters
        return dict(
            cuts=filters.cuts,
            ties=filters.ties,
            FILTERED=filtered,
            CUT=CUT,
            CUT_PIECES=filters.padded,
        )

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

    def _noise(self) -> list[Tensor]:
        return [self.inputs[name] for name in ("seeds", "temperatures", "draw_positions")]

    def _draw(self, logits: Tensor, filtered: bool = False) -> None:
        found = (self._best, self._best_token, self._broken)
        best_of_piece_kernel[(self._pieces, self.shape.rows)](
            logits,
            *self._noise(),
            *found,
            logits.stride(0),
            self.head_rows,
            self._pieces,
            PIECE=PIECE,
            **self._cuts(filtered),
            **overlapping(self._overlap),
        )
        verdict_kernel[(self.shape.runs,)](
            self.inputs["tokens"],
            self.inputs["run_begin"],
            self.inputs["run_rows"],
            *found,
            self.drawn,
            self._pieces,
            ROWS=self.run_width,
            PIECES=triton.next_power_of_2(self._pieces),
            **overlapping(self._overlap),
        )

    def _rank(self, logits: Tensor, filtered: bool = False) -> None:
        leaf_kernel[(-(-self._leaves // LEAVES_AT_ONCE), self.shape.rows)](
            logits,
            *self._noise(),
            self._scores,
            self._bests,
            logits.stride(0),
            self.head_rows,
            self._leaves,
            LEAF=LEAF,
            LEAVES=LEAVES_AT_ONCE,
            **self._cuts(filtered),
            **overlapping(self._overlap),
        )
        rank_kernel[(self.shape.rows,)](
            self._scores,
            self._bests,
            self.drawn,
            self._best_of_row,
            self._scores.stride(0),
            self.head_rows,
            self._leaves,
            RANKS=self.ranks,
            WIDTH=triton.next_power_of_2(self.ranks),
            LEAF=LEAF,
            LEAVES=triton.next_power_of_2(self._leaves),
            num_warps=8,
            **overlapping(self._overlap),
        )


def _host_sides(tensor: Tensor, sides: int) -> list[Tensor]:
    """Where it is copied to."""
    pinned = tensor.device.type == "cuda"
    return [torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for _ in range(sides)]
