"""The operations of a forward, one at a time, each by the very kernels that serve requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Part, Rows, TreeRows
from ssd_engine.models.decoder import LayerWeights

if TYPE_CHECKING:
    from ssd_engine.execution.device_layers import Layers, PromptLayers
    from ssd_engine.execution.step import Step


class Operations(Protocol):
    """Operations of layer ``i``, to be called in this order. One may write to what the one before
    has returned."""

    @property
    def hidden(self) -> Tensor:
        """[rows or more, d]"""
        ...

    def embed(self) -> None: ...

    def project(self, i: int) -> Tensor: ...

    def attend(self, i: int) -> Tensor: ...

    def multiply_o(self, i: int) -> Tensor | None:
        """This rank's part of the sum; None where it has been added to the hidden states."""
        ...

    def add_o(self, i: int) -> None:
        """The sum over ranks, to the hidden states."""
        ...

    def gate(self, i: int) -> Tensor: ...

    def multiply_down(self, i: int) -> Tensor | None: ...

    def add_down(self, i: int) -> None: ...

    def score(self, rows: Tensor) -> Tensor:
        """Logits of these rows, of this rank's tokens."""
        ...


class ForwardOperations:
    """The decoder's own operations."""

    def __init__(self, runner: ModelRunner, parts: Sequence[Rows]) -> None:
        self._runner, self._model = runner, runner.model
        self._tokens, positions, self._slots, self._plan = runner.prepare(parts)
        self._places = self._model.places(positions)
        self.hidden = torch.empty(0)
        self._value = torch.empty(0)  # what the last operation gave

    def embed(self) -> None:
        self.hidden = self._model.embed(self._tokens)

    def project(self, i: int) -> Tensor:
        self._value = self._model.project(self._layer(i), self.hidden)
        return self._value

    def attend(self, i: int) -> Tensor:
        cache, slots = self._runner.kv.layers[i], self._slots
        self._value = self._model.attend(
            self._layer(i), cache, self._value, self._places, slots, self._plan
        )
        return self._value

    def multiply_o(self, i: int) -> Tensor:
        self._value = self._model.multiply_o(self._layer(i), self._value)
        return self._value.clone()

    def add_o(self, i: int) -> None:
        self.hidden = self.hidden + self._model.sum_ranks(self._value, self._layer(i).o_bias)

    def gate(self, i: int) -> Tensor:
        self._value = self._model.gate(self._layer(i), self.hidden)
        return self._value

    def multiply_down(self, i: int) -> Tensor:
        self._value = self._model.multiply_down(self._layer(i), self._value)
        return self._value.clone()

    def add_down(self, i: int) -> None:
        self.hidden = self.hidden + self._model.sum_ranks(self._value, self._layer(i).down_bias)

    def score(self, rows: Tensor) -> Tensor:
        return self._runner.multiply_head(self._model.normalise(self.hidden)[rows])

    def _layer(self, i: int) -> LayerWeights:
        return self._model.weights.layers[i]


class LayerOperations:
    """The operations of layers that use the fused products of steps."""

    def __init__(self, layers: "Layers") -> None:
        self._layers = layers
        self._attended = torch.empty(0)

    @property
    def hidden(self) -> Tensor:
        return self._layers.hidden

    def project(self, i: int) -> Tensor:
        self._layers.project(i)
        return self._layers.projected

    def attend(self, i: int) -> Tensor:
        self._attended = self._layers.attend(i)
        return self._attended

    def multiply_o(self, i: int) -> Tensor | None:
        self._layers.multiply_o(i, self._attended)
        return self._part()

    def add_o(self, i: int) -> None:
        self._layers.add_o(i)

    def gate(self, i: int) -> Tensor:
        self._layers.gate(i)
        return self._layers.gated

    def multiply_down(self, i: int) -> Tensor | None:
        self._layers.multiply_down(i)
        return self._part()

    def add_down(self, i: int) -> None:
        self._layers.add_down(i)

    def _part(self) -> Tensor | None:
        return None if self._layers.alone else self._layers.summed.clone()


class StepOperations(LayerOperations):
    """The operations of a step of few rows, whose inputs are on the device."""

    def __init__(self, step: "Step") -> None:
        super().__init__(step.layers)
        self._step_layers = step.layers

    def embed(self) -> None:
        self._step_layers.embed()

    def score(self, rows: Tensor) -> Tensor:
        self._step_layers.score()
        return self._step_layers.logits[rows]


class PromptOperations(LayerOperations):
    """The operations of a prefill that uses the products of steps."""

    def __init__(self, runner: ModelRunner, layers: "PromptLayers") -> None:
        super().__init__(layers)
        self._runner, self._prompt_layers = runner, layers

    def embed(self) -> None:
        self._prompt_layers.embed()

    def score(self, rows: Tensor) -> Tensor:
        return self._runner.multiply_head(self._runner.model.normalise(self.hidden)[rows])


def prefill_operations(runner: ModelRunner, parts: Sequence[Part]) -> Operations:
    """A prefill of a GPU, and on a CPU every forward."""
    rows = [part for part in parts if isinstance(part, Chunk | TreeRows)]
    layers = runner.prompt_layers(rows)
    return ForwardOperations(runner, rows) if layers is None else PromptOperations(runner, layers)
