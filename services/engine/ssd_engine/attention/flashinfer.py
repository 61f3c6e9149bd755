"""FlashInfer's paged kernel over the same cache, for CUDA.

One kernel does all of it, FA2 prefill: a decode is a prefill of one row, and what is compiled once
serves every use. Trees are attended in two parts, as in sdpa.py; the tail's slots are pages of one
token, so that nothing is gathered.

Exact means that a row is a function of its query and of the keys that it sees, bit for bit:
1. FlashInfer takes the query tile from a plan's average length, and the KV tile from that alone.
   Without a split the kernel walks the keys in such tiles from 0, wherever the chunk begins.
   Padding a run to whole tiles of the largest kind fixes the tile.
2. A tile of which a row sees nothing changes nothing for it: its weights are exactly 0 and the
   scale of what was summed exactly 1. Hence the dummy block has to be finite.
Trees are never exact: they are a draft's, whose results decide about speed and not about text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.attention.base import QueryRun, Run, TreeRun
from ssd_engine.attention.tree_mask import packed_masks
from ssd_engine.errors import ConfigError
from ssd_engine.kvcache.cache import LayerCache

try:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper, merge_state_in_place
except ImportError as error:
    raise ConfigError('a CUDA device needs its extra: pip install "ssd-serve[cuda]"') from error

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # head sizes that the kernels that merge parts know
FULL_TILE = 128  # query rows; no tile is larger
MOST_PADDED = 2048  # query rows of a launch, those that pad included

Rows = slice | Tensor  # rows of the batch, or of a launch
Placed = tuple[int, QueryRun]  # the run's first row in the batch, and the run


@dataclass(frozen=True, slots=True)
class _Launch:
    """Query runs that one planned kernel computes."""

    wrapper: Any
    source: Rows  # the batch row of each row of the launch; those that pad a run repeat its last
    kept: Rows  # rows of the launch that do not pad
    rows: Rows  # where they belong in the batch; the source itself where nothing pads

    def run(self, query: Tensor, cache: LayerCache, out: Tensor) -> None:
        query = query[self.source]
        in_place = self.source is self.rows and isinstance(self.rows, slice)
        result = out[self.rows] if in_place else query.new_empty(query.shape)
        self.wrapper.run(query, (cache.key, cache.value), out=result)
        if not in_place:
            out[self.rows] = result[self.kept]


@dataclass(frozen=True, slots=True)
class _TreeLaunch:
    context: Any  # planned without a mask
    tail: Any  # planned with one, over pages of one token
    rows: Rows

    def run(self, query: Tensor, cache: LayerCache, out: Tensor) -> None:
        query = query[self.rows]
        in_place = isinstance(self.rows, slice)
        shared = out[self.rows] if in_place else query.new_empty(query.shape)
        own = query.new_empty(query.shape)
        pages = (cache.key, cache.value)
        slots = tuple(part.view(-1, 1, *part.shape[2:]) for part in pages)
        _, shared_weight = self.context.run(query, pages, out=shared, return_lse=True)
        _, own_weight = self.tail.run(query, slots, out=own, return_lse=True)
        # Both parts are normalised by themselves: under one softmax each has its share.
        merge_state_in_place(shared, shared_weight, own, own_weight)
        if not in_place:
            out[self.rows] = shared


class FlashInferBackend:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool,
        dummy_block: int = 0,  # belongs to no sequence, and is finite
    ) -> None:
        if dtype not in DTYPES or head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"attention on a CUDA device needs float16 or bfloat16 and heads of 64, 128 or "
                f"256: this model has {dtype} and {head_dim}"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.dummy_block = dummy_block
        # Only results that are split lie here, and are merged before the next kernel begins.
        self._workspace = self._make_workspace()
        self._wrappers: list[Any] = []
        self._planned = 0  # wrappers that the present plan uses
        self._copied = torch.cuda.Event()

    @torch.inference_mode()
    def plan(self, runs: Sequence[Run]) -> list[_Launch | _TreeLaunch]:
        """Good until the next plan, which uses the same buffers."""
        # FlashInfer writes a plan into pinned memory, whence the last may still be on its way.
        self._copied.synchronize()
        self._planned = 0
        starts = accumulate((run.length for run in runs), initial=0)
        placed = list(zip(starts, runs, strict=False))
        queries = [(row, run) for row, run in placed if isinstance(run, QueryRun)]
        trees = [(row, run) for row, run in placed if isinstance(run, TreeRun)]
        plan: list[_Launch | _TreeLaunch] = [*self._plan_queries(queries)]
        if trees:
            plan.append(self._plan_trees(trees))
        self._copied.record(torch.cuda.current_stream(self.device))
        return plan

    def attend(
        self, query: Tensor, cache: LayerCache, plan: Sequence[_Launch | _TreeLaunch]
    ) -> Tensor:
        out = query.new_zeros(query.shape)  # rows of no run write to the cache too
        for launch in plan:
            launch.run(query, cache, out)
        return out.view(query.shape[0], -1)

    def _plan_queries(self, placed: Sequence[Placed]) -> Iterator[_Launch]:
        if not self.exact:
            if placed:
                yield self._launch(placed, 1)
            return
        for batch in _batches(placed):
            yield self._launch(batch, FULL_TILE, disable_split_kv=True)

    def _launch(self, placed: Sequence[Placed], unit: int, **split: bool) -> _Launch:
        """Every run padded to a multiple of ``unit`` rows."""
        runs = [run for _, run in placed]
        lengths = [-(-run.length // unit) * unit for run in runs]
        contexts = [r.context - r.length + n for r, n in zip(runs, lengths, strict=True)]
        tables = [self._table(run, n) for run, n in zip(runs, contexts, strict=True)]
        wrapper = self._prepare(lengths, tables, contexts, self.block_size, causal=True, **split)
        rows = self._rows([row + np.arange(run.length) for row, run in placed])
        if lengths == [run.length for run in runs]:
            return _Launch(wrapper, rows, slice(None), rows)
        source, kept = [], []
        for (row, run), length, first in zip(placed, lengths, _offsets(lengths)[:-1], strict=True):
            source.append(row + np.arange(length).clip(max=run.length - 1))
            kept.append(first + np.arange(run.length))
        return _Launch(wrapper, self._rows(source), self._rows(kept), rows)

    def _plan_trees(self, placed: Sequence[tuple[int, TreeRun]]) -> _TreeLaunch:
        runs = [run for _, run in placed]
        lengths, contexts = [run.length for run in runs], [run.context for run in runs]
        tables = [self._table(run, run.context) for run in runs]
        context = self._prepare(lengths, tables, contexts, self.block_size)
        tails = [np.asarray(run.tail(self.block_size), dtype=np.int32) for run in runs]
        mask, sizes = packed_masks(runs, self.device)
        tail = self._prepare(lengths, tails, list(map(len, tails)), 1, packed_custom_mask=mask)
        # Where each run's mask begins: the kernel counts in bytes, FlashInfer's plan in bits.
        tail._mask_indptr_buf = self._upload(_offsets(sizes))
        rows = self._rows([row + np.arange(run.length) for row, run in placed])
        return _TreeLaunch(context, tail, rows)

    def _prepare(
        self,
        lengths: Sequence[int],
        tables: Sequence[NDArray[np.int32]],
        contexts: Sequence[int],
        page_size: int,
        **options: Any,
    ) -> Any:
        """A planned wrapper. What it reads on the host stays there, so that nothing waits."""
        wrapper = self._next_wrapper()
        last_pages = np.array([(n - 1) % page_size + 1 for n in contexts], dtype=np.int32)
        wrapper.plan(
            _pinned(_offsets(lengths)),
            _pinned(_offsets(list(map(len, tables)))),
            self._upload(np.concatenate(tables)),
            _pinned(last_pages),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            page_size,
            q_data_type=self.dtype,
            max_token_per_sequence=max(lengths),
            **options,
        )
        return wrapper

    def _next_wrapper(self) -> Any:
        if self._planned == len(self._wrappers):
            self._wrappers.append(
                # FA3 takes four times as long to compile.
                BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
            )
        self._planned += 1
        return self._wrappers[self._planned - 1]

    def _table(self, run: Run, context: int) -> NDArray[np.int32]:
        """Pages of ``context`` tokens, of which the run's own may be fewer."""
        own = -(-run.context // self.block_size)
        table = np.full(-(-context // self.block_size), self.dummy_block, dtype=np.int32)
        table[:own] = run.blocks[:own]
        return table

    def _rows(self, parts: Sequence[NDArray[Any]]) -> Rows:
        rows = np.concatenate(parts)
        if (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)  # a view, without a copy
        return self._upload(rows.astype(np.int64))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return _pinned(array).to(self.device, non_blocking=True)

    def _make_workspace(self) -> Tensor:
        # FlashInfer splits keys until there are two blocks of threads for a processor, and sets
        # aside float32 results and weights for a query tile of each split.
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        tile = self.num_heads * FULL_TILE * (self.head_dim + 1) * 4
        size = 2 * processors // self.num_kv_heads * tile + 64
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def _batches(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Runs that have room together; one that is too large for it has a batch of its own."""
    batch: list[Placed] = []
    size = 0
    for one in placed:
        more = -(-one[1].length // FULL_TILE) * FULL_TILE
        if batch and size + more > MOST_PADDED:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += more
    if batch:
        yield batch


def _offsets(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.array([0, *accumulate(lengths)], dtype=np.int32)


def _pinned(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).pin_memory()
