"""torch's scaled_dot_product_attention over gathered pages: it runs anywhere, and is the reference.

Runs of equal length are computed together, padded to the longest context among them.
Trees are attended in two parts, the context that all rows share and the tail of each, under one
softmax.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_engine.attention.base import Run, TreeRun
from ssd_engine.kvcache.cache import LayerCache


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one length."""

    rows: slice | Tensor  # rows of the flat batch, run after run
    length: int
    pages: slice | Tensor  # [runs * pages_per_run], or a slice when one run's pages are adjacent
    num_runs: int
    context: int  # the longest
    mask: Tensor | None  # additive, [runs, 1, group * length, context or tail]


@dataclass(frozen=True, slots=True)
class _TreeGroup(_Group):
    """Trees with equally many rows and equally long tails, which alone the mask is over."""

    beyond: Tensor | None  # additive [runs, 1, 1, context]: where a shorter context has ended
    tail: Tensor  # slots [runs * tail]


def _part_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys, and the log of its total weight [runs, heads, rows].

    What scaled_dot_product_attention calls on a CPU; only this form of it returns the weight.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, weight = flash(q, k, v, 0.0, False, attn_mask=mask)
    return out, weight


def _part_anywhere(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float32, as products of halves are wrong on a part of a CUDA device (kernel_set.py)."""
    scores = (q.float() * (1 / math.sqrt(q.shape[-1]))) @ k.float().transpose(-1, -2)
    scores = scores if mask is None else scores + mask
    weight = scores.logsumexp(dim=-1)
    return torch.exp(scores - weight[..., None]) @ v.float(), weight


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
        self.dummy_block = 0
        self._attend_part = _part_on_cpu if device.type == "cpu" else _part_anywhere
        if device.type == "cuda":
            # cuDNN plans anew for every context length, which costs tens of milliseconds a step.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, runs: Sequence[Run]) -> list[_Group]:
        starts = list(accumulate((run.length for run in runs), initial=0))
        members: dict[tuple[int, int], list[int]] = {}
        for i, run in enumerate(runs):
            tail = run.tail_length if isinstance(run, TreeRun) else 0
            members.setdefault((run.length, tail), []).append(i)
        return [
            self._make_group([runs[i] for i in ids], [starts[i] for i in ids])
            for ids in members.values()
        ]

    def _make_group(self, runs: Sequence[Run], starts: Sequence[int]) -> _Group:
        """Runs of one kind and one length."""
        trees = [run for run in runs if isinstance(run, TreeRun)]
        if trees:
            return self._tree_group(trees, starts)
        return self._group(runs, starts)

    def _tree_group(self, runs: Sequence[TreeRun], starts: Sequence[int]) -> _TreeGroup:
        context = max(run.context for run in runs)
        # In numpy: these are small, and torch's overhead is not.
        visible = np.stack([run.visible() for run in runs])
        additive = np.where(visible, np.float32(0), np.float32("-inf"))
        mask = np.tile(additive, (1, self.group, 1))[:, None]
        return _TreeGroup(
            rows=self._rows(runs[0].length, starts),
            length=runs[0].length,
            pages=self._pages(runs, context),
            num_runs=len(runs),
            context=context,
            beyond=self._beyond([run.context for run in runs], context),
            tail=torch.tensor(
                [slot for run in runs for slot in run.tail(self.block_size)], device=self.device
            ),
            mask=torch.from_numpy(mask).to(self.device, self.dtype),
        )

    def _beyond(self, contexts: list[int], context: int) -> Tensor | None:
        if min(contexts) == context:
            return None
        ends = torch.tensor(contexts, device=self.device)[:, None]
        return self._additive(torch.arange(context, device=self.device) >= ends)[:, None, None]

    def _group(self, runs: Sequence[Run], starts: Sequence[int]) -> _Group:
        length, context = runs[0].length, max(run.context for run in runs)
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

    def _pages(self, runs: Sequence[Run], context: int) -> slice | Tensor:
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
        # Query heads that share a KV head are stacked as further rows.
        return self._additive(keys > last[:, :, None]).repeat(1, self.group, 1)[:, None]

    def _additive(self, hidden: Tensor) -> Tensor:
        """What is added to scores, so that those of hidden keys do not count."""
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(hidden, float("-inf"))

    def attend(self, query: Tensor, cache: LayerCache, plan: list[_Group]) -> Tensor:
        if len(plan) == 1 and isinstance(plan[0].rows, slice):
            return self._attend_group(query, cache, plan[0])
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in plan:
            out[group.rows] = self._attend_group(query[group.rows], cache, group)
        return out

    def _attend_group(self, query: Tensor, cache: LayerCache, group: _Group) -> Tensor:
        runs, length, kv_heads = group.num_runs, group.length, self.num_kv_heads
        dim = query.shape[-1]
        # [runs, kv_heads, group * length, dim]
        q = query.view(runs, length, kv_heads, self.group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(runs, kv_heads, self.group * length, dim)
        out = (
            self._attend_tree(q, cache, group)
            if isinstance(group, _TreeGroup)
            else self._attend(q, cache, group)
        )
        out = out.view(runs, kv_heads, self.group, length, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(runs * length, kv_heads * self.group * dim)

    def _attend(self, q: Tensor, cache: LayerCache, group: _Group) -> Tensor:
        k, v = (self._gather(pages, group) for pages in (cache.key, cache.value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)

    def _attend_tree(self, q: Tensor, cache: LayerCache, group: _TreeGroup) -> Tensor:
        k, v = (self._gather(pages, group) for pages in (cache.key, cache.value))
        tail_k, tail_v = (self._gather_tail(pages, group) for pages in (cache.key, cache.value))
        beyond = None if group.beyond is None else group.beyond.expand(-1, -1, q.shape[2], -1)
        shared, shared_weight = self._attend_part(q, k, v, beyond)
        own, own_weight = self._attend_part(q, tail_k, tail_v, group.mask)
        # Both parts are normalised by themselves: under one softmax each has its share.
        # In float32, as a small share of a large part would be lost in halves.
        share = torch.sigmoid(shared_weight - own_weight)[..., None].float()
        return torch.lerp(own.float(), shared.float(), share).to(q.dtype)

    def _gather_tail(self, pages: Tensor, group: _TreeGroup) -> Tensor:
        """[runs, kv_heads, tail, dim]"""
        chosen = pages.view(-1, *pages.shape[2:]).index_select(0, group.tail)
        return chosen.view(group.num_runs, -1, *chosen.shape[1:]).transpose(1, 2)

    def _gather(self, pages: Tensor, group: _Group) -> Tensor:
        """[runs, kv_heads, context, dim] from pages [blocks, block_size, kv_heads, dim]."""
        where = group.pages
        chosen = pages[where] if isinstance(where, slice) else pages.index_select(0, where)
        flat = chosen.view(group.num_runs, -1, *chosen.shape[2:])
        return flat[:, : group.context].transpose(1, 2)
