"""torch's scaled_dot_product_attention over gathered pages: runs anywhere, and is the oracle.

Runs of equal length are computed together, padded to the longest context among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.attention.base import QueryRun
from ssd_engine.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one length."""

    rows: slice | Tensor  # of the flat batch, run after run
    length: int
    pages: slice | Tensor  # [runs * pages_per_run], or a slice when one run's pages are adjacent
    num_runs: int
    context: int  # the longest
    mask: Tensor | None  # additive, [runs, 1, group * length, context]


class SdpaBackend:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        if device.type == "cuda":
            # cuDNN plans anew for every context length, which costs tens of milliseconds a step.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, runs: Sequence[QueryRun]) -> list[_Group]:
        starts, row = [], 0
        members: dict[int, list[int]] = {}
        for i, run in enumerate(runs):
            members.setdefault(run.length, []).append(i)
            starts.append(row)
            row += run.length
        return [
            self._group(length, [runs[i] for i in ids], [starts[i] for i in ids])
            for length, ids in members.items()
        ]

    def _group(self, length: int, runs: Sequence[QueryRun], starts: Sequence[int]) -> _Group:
        context = max(run.context for run in runs)
        return _Group(
            rows=self._rows(length, starts),
            length=length,
            pages=self._pages(runs, context),
            num_runs=len(runs),
            context=context,
            mask=self._mask(length, [run.context for run in runs], context),
        )

    def _rows(self, length: int, starts: Sequence[int]) -> slice | Tensor:
        if all(b - a == length for a, b in pairwise(starts)):
            return slice(starts[0], starts[-1] + length)
        offsets = torch.arange(length, device=self.device)
        return (torch.tensor(starts, device=self.device)[:, None] + offsets).flatten()

    def _pages(self, runs: Sequence[QueryRun], context: int) -> slice | Tensor:
        count = -(-context // self.block_size)
        tables = [list(run.blocks[:count]) for run in runs]
        if len(tables) == 1 and all(b - a == 1 for a, b in pairwise(tables[0])):
            return slice(tables[0][0], tables[0][-1] + 1)  # read in place, without a copy
        # Padding reads the run's own first page; the mask hides it.
        padded = [table + table[:1] * (count - len(table)) for table in tables]
        return torch.tensor(padded, device=self.device).flatten()

    def _mask(self, length: int, contexts: list[int], context: int) -> Tensor | None:
        if length == 1 and min(contexts) == context:
            return None
        keys = torch.arange(context, device=self.device)
        rows = torch.arange(length, device=self.device)
        last = torch.tensor(contexts, device=self.device)[:, None] - length + rows  # [runs, length]
        hidden = keys > last[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, float("-inf"))
        # Query heads that share a KV head are stacked as further rows.
        return mask.repeat(1, self.group, 1)[:, None]

    def attend(self, query: Tensor, cache: LayerCache, plan: list[_Group]) -> Tensor:
        if len(plan) == 1 and isinstance(plan[0].rows, slice):
            return self._attend(query, cache, plan[0])
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in plan:
            out[group.rows] = self._attend(query[group.rows], cache, group)
        return out

    def _attend(self, query: Tensor, cache: LayerCache, group: _Group) -> Tensor:
        runs, length, kv_heads = group.num_runs, group.length, self.num_kv_heads
        dim = query.shape[-1]
        # [runs, kv_heads, group * length, dim]
        q = query.view(runs, length, kv_heads, self.group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(runs, kv_heads, self.group * length, dim)
        k, v = (self._gather(pages, group) for pages in (cache.key, cache.value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        out = out.view(runs, kv_heads, self.group, length, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(runs * length, kv_heads * self.group * dim)

    def _gather(self, pages: Tensor, group: _Group) -> Tensor:
        """[runs, kv_heads, context, dim] from pages [blocks, block_size, kv_heads, dim]."""
        where = group.pages
        chosen = pages[where] if isinstance(where, slice) else pages.index_select(0, where)
        flat = chosen.view(group.num_runs, -1, *chosen.shape[2:])
        return flat[:, : group.context].transpose(1, 2)
