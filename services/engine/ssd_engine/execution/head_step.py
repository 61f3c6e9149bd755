"""A head's steps of few rows: what each row reads beside its token is found on the device."""

import torch
import triton
from torch import Tensor

from ssd_engine.execution.layer_products import LayerBuffers, SeparateProducts
from ssd_engine.execution.step import StepBuffers, StepLayers
from ssd_engine.forward.step_inputs import StepInputs, StepShape
from ssd_engine.kernels.elementwise import move_kernel, overlapping, states_before_kernel
from ssd_engine.kernels.kernel_set import KernelSet
from ssd_engine.kernels.products.product_shape import ProductShape
from ssd_engine.kvcache.cache import KVCache
from ssd_engine.models.decoder import Decoder
from ssd_engine.models.eagle_head import EagleHead, HeadStates

PIECE = 1024  # entries of a row that a program copies


class ToldStates:
    """What the target has told of rows of the next step, in place of states. Steps of all shapes
    read it, and run one after the other."""

    def __init__(self, head: EagleHead, rows: int) -> None:
        norm = head.weights.norm
        self.given = norm.new_zeros(rows, head.config.hidden_size)
        self.is_given = torch.zeros(rows, dtype=torch.int32, device=norm.device)
        self.logits = torch.full((rows, head.num_tokens), -torch.inf, device=norm.device)

    def put(self, rows: Tensor, states: Tensor) -> None:
        """``states`` [n, d] of these rows."""
        self.given.index_copy_(0, rows, states)
        self.is_given.index_fill_(0, rows, 1)

    def clear(self) -> None:
        """Once the step is launched: the next one goes on from what rows have left."""
        self.is_given.zero_()


class HeadStepProducts(SeparateProducts):
    """The first layer reads embedding and g, each with a norm of its own, side by side."""

    def __init__(
        self,
        head: EagleHead,
        inputs: StepInputs,
        kernels: KernelSet,
        buffers: LayerBuffers,
        states: HeadStates,
        told: ToldStates,
    ) -> None:
        shape = inputs.shape
        super().__init__(head, shape.rows, kernels, buffers, shape.padded_rows)
        self._model, self._inputs, self._states, self._told = head, inputs, states, told
        norm, width = head.weights.norm, head.config.hidden_size
        self._before = norm.new_zeros(shape.padded_rows, width)
        self._both = norm.new_zeros(shape.padded_rows, 2 * width)
        first, last = head.weights.layers[0], head.weights.layers[-1]
        biased = first.qkv_bias is not None
        n, k = first.qkv.shape
        self._first = self._make(ProductShape(n, k, shape.rows, bias=biased))
        n, k = last.qkv.shape
        self._qkv = self._make(ProductShape(n, k, shape.rows, norm=True, bias=biased))

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer adds to; its inputs are beside it."""
        self._find_states()
        head, layer = self._model, self._model.weights.layers[0]
        normed = head.norm(self._before, head.head_weights.state_norm)
        embedded = head.norm(head.embed(tokens), layer.attention_norm)
        width = head.config.hidden_size
        self._both[: len(tokens), :width].copy_(embedded)
        self._both[:, width:].copy_(normed)
        self._hidden.copy_(normed if head.head.norm_before_residual else self._before)
        return self._hidden

    def project(self, i: int, hidden: Tensor) -> Tensor:
        if i:
            return super().project(i, hidden)
        layer = self._model.weights.layers[0]
        self._first(layer.qkv, self._both, self._projected, bias=layer.qkv_bias)
        return self._projected

    def _find_states(self) -> None:
        inputs, shape, width = self._inputs, self._inputs.shape, self._model.config.hidden_size
        names = ("run_begin", "run_rows", "run_depths", "run_branches", "limits", "tables")
        states_before_kernel[(triton.cdiv(width, PIECE), shape.rows_per_run, shape.runs)](
            self._states.rows,
            self._told.given,
            self._told.is_given,
            self._before,
            *(inputs[name] for name in names),
            inputs["scratch"],
            width,
            TABLE=shape.table_width,
            SCRATCH=shape.scratch,
            BLOCK=shape.block_size,
            PIECE=PIECE,
            **overlapping(overlap=False),
        )


class HeadStepLayers(StepLayers):
    """A head's layers over the rows of one step shape."""

    def __init__(
        self,
        states: HeadStates,
        told: ToldStates,
        head: EagleHead,
        kv: KVCache,
        inputs: StepInputs,
        kernels: KernelSet,
        largest: StepShape | None = None,
        buffers: StepBuffers | None = None,
    ) -> None:
        self._head, self._inputs, self._states, self._told = head, inputs, states, told
        super().__init__(head, kv, inputs, kernels, largest, buffers)

    def _make_products(
        self, model: Decoder, inputs: StepInputs, kernels: KernelSet, buffers: StepBuffers
    ) -> HeadStepProducts:
        return HeadStepProducts(self._head, inputs, kernels, buffers, self._states, self._told)

    def finish(self) -> Tensor:
        """Logits [rows, tokens of the target]; states of the rows are kept for those after them."""
        super().finish()
        rows = self._inputs.shape.rows
        following = self._head.following_states(self.hidden[:rows])
        self._states.rows.index_copy_(0, self._inputs["slots"].long(), following)
        return self._head.spread(self.logits, self._told.logits[:rows])

    def move(self) -> None:
        """The states of taken branches, with their keys and values."""
        inputs, states = self._inputs, self._states.rows
        slots, width = states.shape
        told = (inputs[name] for name in ("sources", "targets", "num_moves"))
        padded = triton.next_power_of_2(width)
        move_kernel[(inputs.shape.moves, 1)](states, *told, slots, width, padded, False)
