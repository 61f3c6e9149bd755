"""The runner of a head: its cache also has what each row hands to the row after it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssd_engine.attention.base import AttentionBackend
from ssd_engine.checkpoints.heads.head_checkpoint import HeadCheckpoint
from ssd_engine.checkpoints.heads.head_config import HeadConfig
from ssd_engine.checkpoints.heads.head_expansion import grow_head
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Chunk, Draw, KVCopy, Part, Rows, slots_at, slots_of
from ssd_engine.forward.result import ImmediateForward, PendingForward
from ssd_engine.models.decoder import DecoderWeights
from ssd_engine.models.eagle_head import EagleHead, HeadProducts, HeadStates, HeadWeights
from ssd_engine.models.head_loader import load_head
from ssd_engine.models.layers import PromptLayers
from ssd_engine.models.linear import choose_panels
from ssd_engine.models.rope import RopeTable
from ssd_engine.models.tensor_parallel import SingleRank, TensorParallel

if TYPE_CHECKING:  # what a CUDA device needs is imported where there is one
    from ssd_engine.execution.head_step import ToldStates
    from ssd_engine.execution.step import MakeLayers


@dataclass(frozen=True, slots=True)
class GivenFeatures:
    """What the target has told of the rows of a forward: those of the first tokens of chunks."""

    counts: Sequence[int]  # of each part that has rows; all others go on from the row before them
    rows: Tensor  # [sum of counts, boundaries * target's hidden size], part after part


class HeadRunner(ModelRunner):
    """All rows of one forward read what the rows before them have left in earlier ones."""

    model: EagleHead

    def __init__(
        self,
        head: HeadConfig,
        checkpoint: HeadCheckpoint,
        options: RunnerOptions,
        num_tokens: int,
    ) -> None:
        """``num_tokens`` of the target, padding left out. ``head`` is the checkpoint's; with
        ``expand_to`` it is grown, as its target is."""
        grown = grow_head(head, options.expand_to)
        layers = replace(grown.layers, vocab_size=num_tokens, head_rows=num_tokens)
        self._config, self._checkpoint = replace(grown, layers=layers), checkpoint
        self._num_tokens = num_tokens
        self._given: GivenFeatures | None = None
        self._states = HeadStates()
        self._told_states: ToldStates | None = None  # of steps
        options = replace(options, expand_to=None)
        super().__init__(layers, options, SingleRank(), self._load)

    def step_with_features(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], given: GivenFeatures
    ) -> PendingForward:
        """As ``step``, with what the target has told of some of the rows."""
        if self.steps is not None and self._told_states is not None:
            runs = joined(parts)
            if self.steps.step_for(runs) is not None:
                return self._step_told(runs, draws, self._rows_told(parts, given.counts), given)

        return ImmediateForward(partial(self.forward_with_features, parts, given))

    def forward_with_features(self, parts: Sequence[Part], given: GivenFeatures) -> Tensor | None:
        """As ``forward``."""
        self._given = given
        try:
            return self.forward(parts)
        finally:
            self._given = None

    @property
    def states(self) -> Tensor:
        """What rows have left, by the slots of the cache [slots, d]."""
        return self._states.rows

    @property
    def feature_width(self) -> int:
        """Values of what the target tells of a row."""
        return self._config.feature_width

    def _step_told(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        rows: list[int],
        given: GivenFeatures,
    ) -> PendingForward:
        """A captured step, these rows of which the target has told."""
        if self._told_states is None or not rows:
            return self.step(parts, draws)
        with torch.inference_mode():
            self._told_states.put(self._upload(rows), self._combined(given))
        pending = self.step(parts, draws)
        self._told_states.clear()
        return pending

    def _load(
        self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> DecoderWeights:
        panels = choose_panels(self.options.kernels, dtype, device)
        self._weights: HeadWeights = load_head(
            self._config, self._checkpoint, dtype, device, panels, self._num_tokens
        )
        return self._weights.decoder

    def _make_model(
        self, weights: DecoderWeights, rope: RopeTable, attention: AttentionBackend
    ) -> EagleHead:
        about = (self._config, self._weights, rope, attention, self.tp, self._num_tokens)
        ops = self._fused_ops(rope) if self._tuned else None
        return EagleHead(*about, self._choose_linear(weights), ops)

    def _make_head(self) -> None:
        """Its tokens are not the target's: ``EagleHead.logits`` knows which are which."""

    def _begin_chained_products(self) -> bool:
        """The first layer reads twice as much as the others."""
        return False

    def _step_layers(self) -> "MakeLayers":
        from ssd_engine.execution.head_step import HeadStepLayers, ToldStates

        self._told_states = ToldStates(
            self.model, max(shape.padded_rows for shape in self._step_shapes)
        )
        return partial(HeadStepLayers, self._states, self._told_states)

    def _allocate_cache(self, num_blocks: int) -> None:
        super()._allocate_cache(num_blocks)
        self._states.allocate(num_blocks * self.options.block_size, self.model.weights.norm)

    @property
    def _bytes_per_block(self) -> int:
        row = self.config.hidden_size * self.kv.spec.dtype.itemsize
        return super()._bytes_per_block + self.options.block_size * row

    def _compute_layers(self, parts: Sequence[Rows]) -> Tensor:
        tokens, positions, slots, plan = self.prepare(parts)
        products = HeadProducts(self.model, self._states_before(parts))
        layers = PromptLayers(self.model, self.kv, products, tokens, positions, slots, plan)
        hidden = layers.forward()
        self._states.rows.index_copy_(0, slots, self.model.following_states(hidden))
        return hidden

    def _states_before(self, parts: Sequence[Rows]) -> Tensor:
        """What each row reads beside its token [rows, d]."""
        before = [slot for part in parts for slot in self._slots_before(part)]
        states = self._states.rows.index_select(0, self._upload(before))
        if self._given is None:
            return states
        rows = self._rows_told(parts, self._given.counts)
        if not rows:
            return states
        return states.index_copy_(0, self._upload(rows), self._combined(self._given))

    def _combined(self, given: GivenFeatures) -> Tensor:
        """g [sum of counts, d]"""
        return self.model.combine(given.rows.to(self.device, self.model.weights.norm.dtype))

    def _rows_told(self, parts: Sequence[Part], counts: Sequence[int]) -> list[int]:
        """The rows of a forward that the target has told of."""
        rows: list[int] = []
        begin = 0
        runs = [part for part in parts if not isinstance(part, KVCopy)]
        for part, count in zip(runs, counts, strict=True):
            rows += range(begin, begin + count)
            begin += len(part.tokens)
        return rows

    def _slots_before(self, part: Rows) -> Sequence[int]:
        """Where the row lies that each row goes on from."""
        size = self.options.block_size
        if isinstance(part, Chunk):  # the first row of a text goes on from none, and reads what is
            return slots_at(part.blocks, [max(0, p - 1) for p in part.positions], size)
        if len(part.scratch) > len(part.tokens):
            end = len(part.scratch) - len(part.tokens)
            return part.scratch[end - len(part.tokens) : end]
        return slots_at(part.blocks, part.limits, size)

    def _move(self, parts: Sequence[KVCopy]) -> None:
        super()._move(parts)
        if parts:
            size = self.options.block_size
            sources = self._upload([slot for part in parts for slot in part.sources])
            slots = self._upload([slot for part in parts for slot in slots_of(part, size)])
            states = self._states.rows
            states.index_copy_(0, slots, states.index_select(0, sources))


def joined(parts: Sequence[Part]) -> list[Part]:
    """Chunks that follow each other in one sequence as one: in a step each run writes its own keys
    while others read. What is told of rows divides them for the caller alone."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Chunk) and isinstance(last, Chunk) and _follows(part, last):
            tokens, logits = [*last.tokens, *part.tokens], last.num_logits + part.num_logits
            found[-1] = Chunk(tokens, last.start, part.blocks, logits)
        else:
            found.append(part)
    return found


def _follows(part: Chunk, last: Chunk) -> bool:
    """Rows with logits are the last ones of a chunk."""
    whole = not last.num_logits or part.num_logits == len(part.tokens)
    return whole and part.start == last.end and list(part.blocks) == list(last.blocks)
