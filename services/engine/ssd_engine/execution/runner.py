"""One rank's model and cache, and the forward over a batch of chunks."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssd_engine.attention.base import (
    AttentionBackend,
    AttentionPlan,
    QueryRun,
    Run,
    TreeRun,
)
from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.checkpoints.model_expansion import ModelShape, grow_config
from ssd_engine.errors import ConfigError
from ssd_engine.execution.attention_choice import OWN_DIMS, is_tuned, make_attention
from ssd_engine.execution.device_memory import blocks_on_device, check_weights_fit, needed_share
from ssd_engine.execution.runner_options import DTYPE_NAMES, RunnerOptions
from ssd_engine.forward.batch import (
    Chunk,
    Draw,
    KVCopy,
    Part,
    Rows,
    TreeRows,
    logit_rows,
    scored_rows,
    slots_of,
)
from ssd_engine.forward.result import ForwardResult, ImmediateForward, PendingForward, Score
from ssd_engine.kernels.cpu.panels import PackedWeight
from ssd_engine.kernels.kernel_cache import use_kernel_cache
from ssd_engine.kvcache.cache import KVCache, KVCacheSpec
from ssd_engine.kvcache.host_copies import HostCopies
from ssd_engine.kvcache.swap import Swap
from ssd_engine.models.decoder import Decoder, DecoderWeights
from ssd_engine.models.features import check_boundaries
from ssd_engine.models.layer_ops import LayerOps
from ssd_engine.models.layers import EagerProducts, LayerProducts, PromptLayers
from ssd_engine.models.linear import (
    Linear,
    choose_panels,
    packed_linear,
    plain_linear,
    wide_linear,
)
from ssd_engine.models.loader import load_weights
from ssd_engine.models.rope import RopeTable
from ssd_engine.models.tensor_parallel import TensorParallel, rank_device
from ssd_engine.process.host_memory import available_memory
from ssd_engine.sampling.params import MAX_TOP_LOGPROBS
from ssd_engine.sampling.scoring import score_tokens

if TYPE_CHECKING:  # what a CUDA device needs is imported where there is one
    from ssd_engine.execution.graphs import GraphRunner
    from ssd_engine.execution.step import MakeLayers
    from ssd_engine.execution.step_drawing import PromptDrawing
    from ssd_engine.execution.step_features import StepFeatures
    from ssd_engine.forward.step_inputs import StepShape
    from ssd_engine.kernels.kernel_set import KernelSet
    from ssd_engine.kernels.products.products import Product
    from ssd_engine.kernels.sampling.adjusting import Histories
    from ssd_engine.kernels.sampling.rejecting import Rejector

log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
CPU_CACHE_SHARE = 0.25  # share of the available memory
LOGIT_ROWS = 8  # rows of one product with the head, where row counts are fixed
NUM_SIDES = 2  # of a step: one is filled while the other is in flight
SCORED_ROWS = 16  # logits of so many are there at a time, however many are scored


# (config, tp, dtype, device): the weights of one rank.
WeightLoader = Callable[[ModelConfig, TensorParallel, torch.dtype, torch.device], DecoderWeights]


def _checkpoint_loader(config: ModelConfig, options: RunnerOptions) -> WeightLoader:
    """The checkpoint is looked at now, before anything else is done."""
    checkpoint = open_checkpoint(options.directory, config)

    def load(
        grown: ModelConfig, tp: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> DecoderWeights:
        panels = choose_panels(options.kernels, dtype, device)
        return load_weights(config, grown, checkpoint, tp, dtype, device, panels)

    return load


class ModelRunner:
    def __init__(
        self,
        config: ModelConfig,
        options: RunnerOptions,
        tp: TensorParallel,
        load: WeightLoader | None = None,
    ) -> None:
        """``config`` is the checkpoint's; ``self.config`` that of the model it is grown to.
        ``load`` makes weights where there is no checkpoint."""
        load = load or _checkpoint_loader(config, options)
        self._watched: tuple[int, ...] = ()
        self._boundaries: tuple[int, ...] = ()  # of prompts
        self._told: StepFeatures | None = None  # of steps
        self.features: Tensor | None = None  # of the last forward that was no captured step
        grown = grow_config(config, options.expand_to or ModelShape())
        self.config = grown
        self.options = options
        self.tp = tp
        self.device = rank_device(options.device, tp.local_rank, options.devices)
        dtype = DTYPES[options.dtype]
        self._tuned = is_tuned(grown, options, dtype, self.device)
        if self.device.type == "cuda" and not self._tuned:
            log.warning(
                "%s, heads of %d and --kernels %s on a CUDA device: torch's attention, no graphs, "
                "and rounding that depends on the batch; --dtype bfloat16, heads of %s and "
                "--kernels auto have all three",
                options.dtype,
                grown.head_dim,
                options.kernels,
                ", ".join(map(str, OWN_DIMS)),
            )
        kv_heads = grown.kv_heads_per_rank(tp.size)
        spec = KVCacheSpec(grown.num_layers, kv_heads, grown.head_dim, options.block_size, dtype)
        if self.device.type == "cuda":
            use_kernel_cache(options.kernel_cache)
            torch.cuda.set_device(self.device)
            check_weights_fit(grown, options, tp.size, dtype, self.device)
        weights = load(grown, tp, dtype, self.device)
        self.kv = KVCache(spec, self.device)
        if self.device.type != "cuda":
            self._count_blocks()  # before tables of as many positions as the model says are made
        attention = make_attention(
            grown, options, grown.num_heads // tp.size, kv_heads, dtype, self.device
        )
        rope = RopeTable(grown.rope, grown.head_dim, options.max_model_len, dtype, self.device)
        self.model = self._make_model(weights, rope, attention)
        self._chains_products = self._begin_chained_products()
        self._histories = self._make_histories() if self._tuned else None
        # Steps of few rows, where these have kernels of their own.
        self.steps = self._make_steps() if self._tuned else None
        self._drawing = self._make_prompt_drawing() if self._tuned else None
        self._head = self._make_head() if self._tuned else None
        self.num_blocks = self._allocate()
        self.host_copies = HostCopies(self.kv)
        if self.steps is not None:
            self.steps.capture(self.dummy_slot)
            if options.exact:  # heads may read it: what is compiled for that is compiled now
                self.make_step_features((0,))
        self._finish_kernels()

    def _make_model(
        self, weights: DecoderWeights, rope: RopeTable, attention: AttentionBackend
    ) -> Decoder:
        ops = self._fused_ops(rope) if self._tuned else None
        linear = self._choose_linear(weights)
        return Decoder(self.config, weights, rope, attention, self.tp, linear, ops)

    @property
    def asynchronous(self) -> bool:
        """Whether a launched step is computed while the caller does something else."""
        return self.steps is not None

    @property
    def chains(self) -> bool:
        """Whether a step may name tokens of the step before it, which is still computed.

        A token -n - 1 is what row n drew there, or its best one; ``Pending.rows`` tells which row
        is whose.
        """
        return self.steps is not None and self.steps.chains

    @property
    def gap_seconds(self) -> float:
        """The device's idle time before the last step; 0 where nobody knows."""
        return 0.0 if self.steps is None else self.steps.gap_seconds

    def _make_steps(self) -> "GraphRunner | None":
        from ssd_engine.execution.graphs import GraphRunner
        from ssd_engine.execution.step import Step, StepBuffers

        shapes = self._step_shapes
        if not shapes:
            return None
        ranks, last = self.options.ranks, None
        largest = shapes[-1] if self.options.exact else None
        most_rows = max(shape.rows for shape in shapes)
        if self.tp.size == 1:  # other ranks do not know what is drawn
            last = torch.zeros(most_rows, dtype=torch.int32, device=self.device)
        buffers = StepBuffers(self.model, max(shapes, key=lambda shape: shape.rows))
        about = (ranks, self._kernels, last, NUM_SIDES, self._histories, largest, buffers)
        layers = self._step_layers()
        steps = [Step(self.model, self.kv, shape, *about, layers) for shape in shapes]
        eager = self.options.eager or not self.tp.in_graphs
        return GraphRunner(steps, eager, self._make_rejector())

    def _step_layers(self) -> "MakeLayers":
        from ssd_engine.execution.step import StepLayers

        return StepLayers

    def _make_rejector(self) -> "Rejector | None":
        """A draft verifies nothing. Several ranks leave that to the host."""
        from ssd_engine.kernels.sampling.rejecting import Rejector

        if self.tp.size > 1 or not self.options.exact or self.options.ranks > 1:
            return None
        return Rejector(
            max(shape.runs for shape in self._step_shapes),
            max(shape.rows for shape in self._step_shapes),
            max(shape.rows_per_run for shape in self._step_shapes),
            self.config.head_rows,
            self.device,
        )

    def _make_histories(self) -> "Histories | None":
        """The first rank draws, and keeps what penalties need to know of each sequence."""
        from ssd_engine.kernels.sampling.adjusting import Histories

        shapes = self._step_shapes
        if self.tp.rank or not shapes:
            return None
        places = min(self.options.max_num_seqs, max(shape.runs for shape in shapes))
        most_rows = max(shape.rows for shape in shapes)
        vocab, overlap = self.config.head_rows, self._kernels.overlap
        about = (places, most_rows, vocab, self.device, overlap, self.options.max_path)
        return Histories(*about, self.config.vocab_size)

    def _finish_kernels(self) -> None:
        """What is compiled on first use is compiled now."""
        if self._drawing is not None:
            self._drawing.warm_up()
        if self._chains_products:
            from ssd_engine.kernels.driver import finish_compiling

            finish_compiling()

    def _make_prompt_drawing(self) -> "PromptDrawing | None":
        """A draft does not draw after prompts."""
        from ssd_engine.execution.step_drawing import PromptDrawing

        if self._histories is None or not self.options.exact:
            return None
        vocab, overlap = self.config.head_rows, self._kernels.overlap
        return PromptDrawing(LOGIT_ROWS, vocab, self.device, overlap, self._histories)

    def _fused_ops(self, rope: RopeTable) -> LayerOps:
        from ssd_engine.execution.device_layer_ops import FusedOps

        heads = self.config.num_heads // self.tp.size
        kv_heads = self.config.kv_heads_per_rank(self.tp.size)
        return FusedOps(rope, self.config.qk_norm_eps, heads, kv_heads)

    def _make_head(self) -> "Product | None":
        from ssd_engine.kernels.products.product_shape import ProductShape
        from ssd_engine.kernels.products.products import make_product

        n, k = self.model.weights.head.shape
        shape = ProductShape(n, k, LOGIT_ROWS, wide=True)
        return make_product(shape, DTYPES[self.options.dtype], self.device, self._kernels)

    @cached_property
    def _step_shapes(self) -> "list[StepShape]":
        from ssd_engine.execution.step_shapes import step_shapes

        return step_shapes(self.options)

    @cached_property
    def _kernels(self) -> "KernelSet":
        from ssd_engine.kernels.kernel_set import choose_kernels

        return choose_kernels(self.options.kernels, self.device, steady=self.options.exact)

    def _choose_linear(self, weights: DecoderWeights) -> Linear:
        if self.device.type == "cuda":
            return self._linear_on_device()
        return packed_linear if isinstance(weights.head, PackedWeight) else plain_linear

    def _linear_on_device(self) -> Linear:
        """Where cuBLAS cannot be trusted, or gives rows other bits in other company, products of
        halves are ours, or in float32."""
        from ssd_engine.kernels.kernel_set import has_whole_device

        if self._tuned and not self._kernels.blas:
            from ssd_engine.kernels.products.triton_kernels import triton_linear

            return triton_linear
        if self.options.dtype == "float32" or has_whole_device(self.device):
            return plain_linear
        return wide_linear

    def _allocate(self) -> int:
        blocks = self._count_blocks()
        # One more, of no sequence: what pads a forward is written there.
        self._allocate_cache(blocks + self._tuned)
        self._set_dummy(blocks)
        return blocks

    def _allocate_cache(self, num_blocks: int) -> None:
        self.kv.allocate(num_blocks)

    @property
    def _bytes_per_block(self) -> int:
        return self.kv.spec.bytes_per_block

    def _count_blocks(self) -> int:
        """Those of the KV cache, in what is left; the same number on every rank."""
        blocks = self.tp.minimum(self.options.num_kv_blocks or self._blocks_that_fit())
        needed = self._blocks_per_sequence()
        if blocks < needed:
            shorter = blocks * self.options.block_size - self.options.max_tail
            raise ConfigError(
                f"the KV cache has room for {blocks} blocks, one sequence of --max-model-len "
                f"{self.options.max_model_len} needs {needed}: lower --max-model-len to "
                f"{max(0, shorter)} or give more memory{self._more_memory(needed - blocks)}"
            )
        return blocks

    def _more_memory(self, missing: int) -> str:
        if self.device.type != "cuda":
            other = (self.options.host_bytes + self.options.told_bytes) / 2**20
            return f"; {other:,.0f} MiB of it are for features" if other else ""
        share = needed_share(self.options, missing * self._bytes_per_block, self.device)
        return f" (--gpu-memory-utilization {share:.2f})" if share <= 1 else ""

    def _set_dummy(self, block: int) -> None:
        # A slot of no sequence, to which rows are written that pad a step.
        self.dummy_slot = block * self.options.block_size
        if self._tuned:
            self.model.attention.dummy_block = block

    def _blocks_per_sequence(self) -> int:
        """Blocks of the longest sequence, a tree after it included."""
        size = self.options.block_size
        return -(-self.options.max_model_len // size) - (-self.options.max_tail // size)

    def _blocks_that_fit(self) -> int:
        """As many as memory allows, and no more than all sequences together can use."""
        useful = self.options.max_num_seqs * self._blocks_per_sequence()
        size = self._bytes_per_block
        if self.device.type == "cuda":
            self._warm_up()
            return min(blocks_on_device(self.options, size, self.device), useful)
        budget = CPU_CACHE_SHARE * available_memory()
        budget -= self.options.host_bytes + self.options.told_bytes
        budget /= self.tp.local_size
        return max(0, min(int(budget) // size, useful))

    def _warm_up(self) -> None:
        """The largest forward, over a cache that is just large enough for it."""
        rows = min(self.options.max_forward_tokens, self.options.max_model_len - 1)
        blocks = -(-self.options.max_forward_tokens // self.options.block_size) + 1
        self._allocate_cache(blocks + 1)
        self._set_dummy(blocks)
        scored = min(rows, SCORED_ROWS) if self.options.exact else 0
        self.forward([Chunk([0] * rows, 0, list(range(blocks)), 1, scored)], score=_score_in_full)
        self._allocate_cache(0)

    @torch.inference_mode()
    def forward(
        self,
        parts: Sequence[Part],
        launched: Callable[[], None] | None = None,
        score: Score | None = None,
    ) -> Tensor | None:
        """Logits [sum of num_logits, vocab] on rank 0, part after part; None elsewhere.

        ``launched`` is called as soon as the device has its work: on a CPU, which works when it
        is asked to, before. ``score`` is called on rank 0.
        """
        if launched is not None and self.device.type == "cpu":
            launched()
        if self.steps is not None:
            self.steps.interrupted()
        if not self._tuned:
            self._clear_fresh_blocks([part for part in parts if not isinstance(part, TreeRows)])
        self._move([part for part in parts if isinstance(part, KVCopy)])
        rows = [part for part in parts if not isinstance(part, KVCopy)]
        logits = self._compute(rows, score) if rows else None
        if launched is not None and self.device.type != "cpu":
            launched()
        return logits

    def swap(self, swap: Swap) -> None:
        self.host_copies.apply(swap)

    @torch.inference_mode()
    def draw(self, logits: Tensor | None, draws: Sequence[Draw | None]) -> ForwardResult:
        """Draws from what a forward has given: on the device, where there are kernels for it."""
        if self._drawing is None or logits is None or not draws:
            return ForwardResult(lambda: logits)
        return self._drawing.draw(logits, draws)

    def step(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        launched: Callable[[], None] | None = None,
    ) -> PendingForward:
        """A forward over few rows of each sequence: a round, or one depth of trees.

        ``draws``: of every row that asks for logits; None where its token is not drawn here.
        """
        if self.steps is not None:
            flight = self.steps.launch(parts, draws, self.dummy_slot, launched)
            if flight is not None:
                return flight
            if self.options.exact:
                raise RuntimeError("a step is larger than what the server was started for")
        return ImmediateForward(lambda: self.forward(parts, launched), lambda: self.features)

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> PendingForward | None:
        """The step after one over trees, or single tokens, alone, which is the last that was
        launched: every row goes on from the token that it has drawn there, and writes to its slot.

        ``widths``: of rows, run after run, that are drawn for rejection; -1: coupled. Rows with a
        history were drawn there with one recent token, their own. None where the step has to be
        said in full.
        """
        return None if self.steps is None else self.steps.deepen(flight, slots, widths)

    def _compute(self, parts: Sequence[Rows], score: Score | None) -> Tensor | None:
        hidden = self._compute_layers(parts)
        self._score(hidden, scored_rows(parts), score)
        wanted = logit_rows(parts)
        if not wanted:
            return None
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[self._upload(wanted)]
        return self._logits(self.model.normalise(hidden))

    def _compute_layers(self, parts: Sequence[Rows]) -> Tensor:
        """Hidden states [rows, d], before the final norm."""
        layers = self.prompt_layers(parts)
        if not self._boundaries:
            return layers.forward()
        hidden, self.features = layers.forward_with_features(self._boundaries)
        return hidden

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        """Capture one more graph of steps that tell the residual stream at these boundaries, while
        others serve. True: all are there, and ``watch`` takes no time."""
        check_boundaries(boundaries, self.config.num_layers)
        watched = tuple(boundaries)
        if self.steps is None or watched in ((), self._watched):
            return True
        try:
            return self.steps.prepare(self._step_features(watched))
        except torch.OutOfMemoryError:
            self._told = None  # whoever asked may go on with others
            raise

    def watch(self, boundaries: Sequence[int]) -> None:
        """From now on forwards and steps tell the residual stream of their rows at these
        boundaries [rows, boundaries * d], part after part; with none of them, nothing is copied.

        Prompts tell it on the first rank alone. Steps are captured on all ranks alike.
        """
        check_boundaries(boundaries, self.config.num_layers)
        watched = tuple(boundaries)
        if watched == self._watched:
            return
        self._watched, self.features = watched, None
        self._boundaries = () if self.tp.rank else watched
        if self.steps is not None:
            try:
                self.steps.watch(self._step_features(watched) if watched else None)
            except torch.OutOfMemoryError:
                self._told = None  # whoever asked may go on with others
                raise

    def _step_features(self, boundaries: tuple[int, ...]) -> "StepFeatures":
        """The last ones, where the same are asked for again."""
        if self._told is None or self._told.boundaries != boundaries:
            self._told = self.make_step_features(boundaries)
        return self._told

    def make_step_features(self, boundaries: tuple[int, ...]) -> "StepFeatures":
        """Buffers for what all steps tell at these boundaries."""
        from ssd_engine.execution.step_features import StepFeatures

        rows = max(shape.padded_rows for shape in self._step_shapes)
        about = (self.model, boundaries, rows, NUM_SIDES, self._kernels.overlap)
        features = StepFeatures(*about)
        norm = self.model.weights.norm
        features.warm_up(norm.new_zeros(1, self.config.hidden_size))
        return features

    def wait(self) -> None:
        """Until the device has computed all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def beside_forwards(self) -> AbstractContextManager[object]:
        """What is done inside does not wait for what was launched last."""
        return nullcontext() if self.steps is None else self.steps.beside()

    def _score(self, hidden: Tensor, rows: list[int], score: Score | None) -> None:
        """Other ranks than the first have no logits, but their share in these."""
        for begin in range(0, len(rows), SCORED_ROWS):
            some = self._upload(rows[begin : begin + SCORED_ROWS])
            logits = self._logits(self.model.normalise(hidden[some]))
            if logits is not None and score is not None:
                score(logits)

    def prompt_layers(self, parts: Sequence[Rows]) -> PromptLayers:
        """The layers of a prefill, and of every forward where there are no steps."""
        rows = sum(len(part.tokens) for part in parts)
        products = self._prompt_products(rows)
        return PromptLayers(self.model, self.kv, products, *self.prepare(parts))

    def _prompt_products(self, rows: int) -> LayerProducts:
        if not self._chains_products:
            return EagerProducts(self.model)
        from ssd_engine.execution.layer_products import LayerBuffers, make_layer_products

        buffers = LayerBuffers(self.model, rows)
        return make_layer_products(self.model, rows, self._kernels, buffers)

    def _begin_chained_products(self) -> bool:
        """Whether there are any; then they are compiled while all else is made ready."""
        if not self._tuned:
            return False
        from ssd_engine.execution.layer_products import chains_products, compile_chained

        chains = chains_products(self.model, self._kernels)
        if chains:
            compile_chained(self.model, self._kernels)
        elif self._kernels.streams(DTYPES[self.options.dtype]):
            log.warning(
                "our CUDA sources do not cover the sizes of this model's layers (they need hidden "
                "states of a multiple of 64, other outputs of 16, inputs of 8): products are "
                "Triton's, which are slower"
            )
        return chains

    def prepare(self, parts: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
        """Tokens, positions and slots of the rows of a forward, and its plan of attention."""
        tokens = [t for part in parts for t in part.tokens]
        positions = [position for part in parts for position in part.positions]
        slots = [slot for part in parts for slot in slots_of(part, self.options.block_size)]
        plan = self.model.attention.plan([_run(part) for part in parts])
        return self._upload(tokens), self._upload(positions), self._upload(slots), plan

    def _logits(self, hidden: Tensor) -> Tensor | None:
        if self._head is None:
            return self.model.logits(hidden)
        whole = self.tp.gather_columns(self.multiply_head(hidden))
        return None if whole is None else whole[:, : self.config.head_rows]

    def multiply_head(self, hidden: Tensor) -> Tensor:
        """[rows, this rank's tokens]; on a tuned device by products of a fixed number of rows."""
        if self._head is None:
            return self.model.multiply_head(hidden)
        rows, head = hidden.shape[0], self.model.weights.head
        padded = hidden.new_zeros(-(-rows // LOGIT_ROWS) * LOGIT_ROWS, hidden.shape[1])
        padded[:rows] = hidden
        out = torch.empty(padded.shape[0], head.shape[0], device=self.device)
        for begin in range(0, rows, LOGIT_ROWS):
            some = slice(begin, begin + LOGIT_ROWS)
            self._head(head, padded[some], out[some])
        return out[:rows]

    def _upload(self, values: list[int]) -> Tensor:
        if self.device.type == "cpu":
            return torch.tensor(values)
        return torch.tensor(values).pin_memory().to(self.device, non_blocking=True)

    def _clear_fresh_blocks(self, parts: Sequence[Chunk | KVCopy]) -> None:
        """A block is fresh when its first slot is written."""
        size = self.options.block_size
        fresh = [b for p in parts for b in p.blocks[-(-p.start // size) : -(-p.end // size)]]
        if fresh:
            blocks = self._upload(fresh)
            for cache in self.kv.layers:
                cache.clear(blocks)

    def _move(self, parts: Sequence[KVCopy]) -> None:
        if not parts:
            return
        size = self.options.block_size
        source_rows = self._upload([slot for part in parts for slot in part.sources])
        rows = self._upload([slot for part in parts for slot in slots_of(part, size)])
        for cache in self.kv.layers:
            cache.move(source_rows, rows)


def _score_in_full(logits: Tensor) -> None:
    """As much as a request may ask for."""
    score_tokens(logits, [0] * len(logits), MAX_TOP_LOGPROBS)


def _run(part: Rows) -> Run:
    if isinstance(part, Chunk):
        return QueryRun(len(part.tokens), part.end, part.blocks)
    return TreeRun(len(part.tokens), part.context, part.blocks, part.limits, part.scratch)
