"""One rank's model and cache, and the forward over a batch of chunks."""

import logging
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_engine.attention import QueryRun, Run, SdpaBackend, TreeRun
from ssd_engine.batch import Chunk, Moved, Part, Rows, TreeRows
from ssd_engine.checkpoint import open_checkpoint
from ssd_engine.config import ModelConfig
from ssd_engine.decoder import Decoder, DecoderWeights
from ssd_engine.errors import ConfigError
from ssd_engine.growth import Shape, grow_config
from ssd_engine.kv_cache import KVCacheSpec, LayerCache, allocate
from ssd_engine.linear import Linear, plain_linear, second_layout
from ssd_engine.loader import load_weights
from ssd_engine.rope import RopeTable
from ssd_engine.runner_options import DTYPE_NAMES, RunnerOptions
from ssd_engine.tensor_parallel import TensorParallel, rank_device

log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
CPU_CACHE_SHARE = 0.25  # of the memory that is available
SECOND_COPY_SHARE = 0.1  # likewise, at most, for weights in a second layout


class ModelRunner:
    def __init__(self, config: ModelConfig, options: RunnerOptions, tp: TensorParallel) -> None:
        """``config`` is the checkpoint's; ``self.config`` that of the model it is grown to."""
        checkpoint = open_checkpoint(options.directory, config)
        grown = grow_config(config, options.expand_to or Shape())
        self.config = grown
        self.options = options
        self.tp = tp
        self.device = rank_device(options.device, tp.rank)
        dtype = DTYPES[options.dtype]
        kv_heads = grown.kv_heads_per_rank(tp.size)
        weights = load_weights(config, grown, checkpoint, tp, dtype, self.device)
        self.model = Decoder(
            grown,
            weights,
            RopeTable(grown.rope, grown.head_dim, options.max_model_len, dtype, self.device),
            SdpaBackend(
                grown.num_heads // tp.size, kv_heads, options.block_size, dtype, self.device
            ),
            tp,
            self._choose_linear(weights),
        )
        self.spec = KVCacheSpec(
            grown.num_layers, kv_heads, grown.head_dim, options.block_size, dtype
        )
        self.num_blocks = self._agree_on_blocks()
        self.caches: list[LayerCache] = allocate(self.spec, self.num_blocks, self.device)

    def _choose_linear(self, weights: DecoderWeights) -> Linear:
        matrices = weights.matrices()
        size = sum(matrix.numel() * matrix.itemsize for matrix in matrices)
        on_cpu = self.device.type == "cpu" and self.options.dtype == "float32"
        if not on_cpu or size * self.tp.size > SECOND_COPY_SHARE * available_memory():
            return plain_linear
        return second_layout(matrices)

    def _agree_on_blocks(self) -> int:
        """The minimum over ranks, so that a block id is valid on each of them."""
        blocks = self.tp.minimum(self.options.num_kv_blocks or self._blocks_that_fit())
        needed = self._blocks_per_sequence()
        if blocks < needed:
            shorter = blocks * self.options.block_size - self.options.max_tail
            raise ConfigError(
                f"the KV cache has room for {blocks} blocks, one sequence of --max-model-len "
                f"{self.options.max_model_len} needs {needed}: lower --max-model-len to "
                f"{max(0, shorter)} or give more memory"
            )
        return blocks

    def _blocks_per_sequence(self) -> int:
        """Of the longest sequence, a tree after it included."""
        size = self.options.block_size
        return -(-self.options.max_model_len // size) - (-self.options.max_tail // size)

    def _blocks_that_fit(self) -> int:
        """As many as memory allows, and no more than all sequences together can use."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = free - (1 - self.options.gpu_memory_utilization) * total
        else:
            budget = CPU_CACHE_SHARE * available_memory() / self.tp.size
        useful = self.options.max_num_seqs * self._blocks_per_sequence()
        return max(0, min(int(budget) // self.spec.bytes_per_block, useful))

    @torch.inference_mode()
    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None] | None = None
    ) -> Tensor | None:
        """Logits [sum of num_logits, vocab] on rank 0, part after part; None elsewhere.

        ``launched`` is called as soon as the device has its work: on a CPU, which works when it
        is asked to, before.
        """
        if launched is not None and self.device.type == "cpu":
            launched()
        self._clear_fresh_blocks([part for part in parts if not isinstance(part, TreeRows)])
        self._move([part for part in parts if isinstance(part, Moved)])
        rows = [part for part in parts if not isinstance(part, Moved)]
        logits = self._compute(rows) if rows else None
        if launched is not None and self.device.type != "cpu":
            launched()
        return logits

    def _compute(self, parts: Sequence[Rows]) -> Tensor | None:
        tokens = torch.tensor([t for part in parts for t in part.tokens], device=self.device)
        positions, slots = self._places(parts)
        plan = self.model.attention.plan([_run(part) for part in parts])
        hidden = self.model.forward(tokens, positions, slots, plan, self.caches)
        wanted = _logit_rows(parts)
        if not wanted:
            return None
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=self.device)]
        return self.model.logits(hidden)

    def _clear_fresh_blocks(self, parts: Sequence[Chunk | Moved]) -> None:
        """A block is fresh when its first slot is written."""
        size = self.options.block_size
        fresh = [b for p in parts for b in p.blocks[-(-p.start // size) : -(-p.end // size)]]
        if fresh:
            blocks = torch.tensor(fresh, device=self.device)
            for cache in self.caches:
                cache.clear(blocks)

    def _move(self, parts: Sequence[Moved]) -> None:
        if not parts:
            return
        size = self.options.block_size
        sources = [slot for part in parts for slot in part.sources]
        slots = [slot for part in parts for slot in _slots(part, size)]
        source_rows = torch.tensor(sources, device=self.device)
        rows = torch.tensor(slots, device=self.device)
        for cache in self.caches:
            cache.move(source_rows, rows)

    def _places(self, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Position and cache slot of every row."""
        size = self.options.block_size
        positions: list[int] = []
        slots: list[int] = []
        for part in parts:
            if isinstance(part, Chunk):
                positions += range(part.start, part.end)
                slots += _slots(part, size)
            else:
                positions += part.positions
                slots += part.slots
        return (
            torch.tensor(positions, device=self.device),
            torch.tensor(slots, device=self.device),
        )


def _slots(part: Chunk | Moved, size: int) -> list[int]:
    return [part.blocks[p // size] * size + p % size for p in range(part.start, part.end)]


def _run(part: Rows) -> Run:
    if isinstance(part, Chunk):
        return QueryRun(len(part.tokens), part.end, part.blocks)
    return TreeRun(len(part.tokens), part.context, part.blocks, part.tail, part.visible)


def _logit_rows(parts: Sequence[Rows]) -> list[int]:
    rows: list[int] = []
    end = 0
    for part in parts:
        end += len(part.tokens)
        rows += range(end - part.num_logits, end)
    return rows


def available_memory() -> int:
    """Bytes that this machine can still give, the page cache not counted as taken."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        log.debug("no /proc/meminfo")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
