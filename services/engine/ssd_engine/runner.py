"""One rank's model and cache, and the forward over a batch of chunks."""

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.attention import QueryRun, SdpaBackend
from ssd_engine.batch import Chunk
from ssd_engine.checkpoint import open_checkpoint
from ssd_engine.config import ModelConfig
from ssd_engine.decoder import Decoder
from ssd_engine.errors import ConfigError
from ssd_engine.kv_cache import KVCacheSpec, LayerCache, allocate
from ssd_engine.loader import load_weights
from ssd_engine.rope import RopeTable
from ssd_engine.runner_options import DTYPE_NAMES, RunnerOptions
from ssd_engine.tensor_parallel import TensorParallel, rank_device

log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
CPU_CACHE_SHARE = 0.25  # of the memory that is available


class ModelRunner:
    def __init__(self, config: ModelConfig, options: RunnerOptions, tp: TensorParallel) -> None:
        self.config = config
        self.options = options
        self.tp = tp
        self.device = rank_device(options.device, tp.rank)
        dtype = DTYPES[options.dtype]
        checkpoint = open_checkpoint(options.directory, config)
        kv_heads = config.kv_heads_per_rank(tp.size)
        self.model = Decoder(
            config,
            load_weights(config, checkpoint, tp, dtype, self.device),
            RopeTable(config.rope, config.head_dim, options.max_model_len, dtype, self.device),
            SdpaBackend(
                config.num_heads // tp.size, kv_heads, options.block_size, dtype, self.device
            ),
            tp,
        )
        self.spec = KVCacheSpec(
            config.num_layers, kv_heads, config.head_dim, options.block_size, dtype
        )
        self.num_blocks = self._agree_on_blocks()
        self.caches: list[LayerCache] = allocate(self.spec, self.num_blocks, self.device)

    def _agree_on_blocks(self) -> int:
        """The minimum over ranks, so that a block id is valid on each of them."""
        blocks = self.tp.minimum(self.options.num_kv_blocks or self._blocks_that_fit())
        needed = -(-self.options.max_model_len // self.options.block_size)
        if blocks < needed:
            raise ConfigError(
                f"the KV cache has room for {blocks} blocks, one sequence of --max-model-len "
                f"{self.options.max_model_len} needs {needed}: lower --max-model-len to "
                f"{blocks * self.options.block_size} or give more memory"
            )
        return blocks

    def _blocks_that_fit(self) -> int:
        """As many as memory allows, and no more than all sequences together can use."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            budget = free - (1 - self.options.gpu_memory_utilization) * total
        else:
            budget = CPU_CACHE_SHARE * available_memory() / self.tp.size
        useful = self.options.max_num_seqs * -(
            -self.options.max_model_len // self.options.block_size
        )
        return max(0, min(int(budget) // self.spec.bytes_per_block, useful))

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits [sum of num_logits, vocab] on rank 0, chunk after chunk; None elsewhere."""
        tokens = torch.tensor([t for c in chunks for t in c.tokens], device=self.device)
        positions, slots = self._places(chunks)
        self._clear_fresh_blocks(chunks)
        runs = [QueryRun(len(c.tokens), c.end, c.blocks) for c in chunks]
        plan = self.model.attention.plan(runs)
        hidden = self.model.forward(tokens, positions, slots, plan, self.caches)
        wanted = _logit_rows(chunks)
        if not wanted:
            return None
        if len(wanted) < hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=self.device)]
        return self.model.logits(hidden)

    def _clear_fresh_blocks(self, chunks: Sequence[Chunk]) -> None:
        """A block is fresh when its first slot is written."""
        size = self.options.block_size
        fresh = [b for c in chunks for b in c.blocks[-(-c.start // size) : -(-c.end // size)]]
        if fresh:
            blocks = torch.tensor(fresh, device=self.device)
            for cache in self.caches:
                cache.clear(blocks)

    def _places(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Position and cache slot of every row."""
        size = self.options.block_size
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            span = range(chunk.start, chunk.end)
            positions += span
            slots += [chunk.blocks[p // size] * size + p % size for p in span]
        return (
            torch.tensor(positions, device=self.device),
            torch.tensor(slots, device=self.device),
        )


def _logit_rows(chunks: Sequence[Chunk]) -> list[int]:
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.tokens)
        rows += range(end - chunk.num_logits, end)
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
