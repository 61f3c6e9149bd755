"""What a model needs from its tensor-parallel group: a sum and a gather."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ssd_engine.models.ordered_sum import ordered_sum

GATHERED_BYTES = 1 << 19  # of a rank's part: larger ones are added up in pieces, a rank each


class TensorParallel(Protocol):
    rank: int
    size: int
    local_rank: int  # among the ranks of its node, which tells its device
    local_size: int  # ranks of its node, which share its memory
    in_graphs: bool  # its sums can be part of a captured step

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank; ``x`` may be written to. The bits of a number follow
        from what ranks have of it alone."""

    def gather_columns(self, x: Tensor) -> Tensor | None:
        """The columns of all ranks side by side, on rank 0; None elsewhere."""

    def minimum(self, value: int) -> int:
        """The smallest value over ranks, on every rank."""


def rank_device(kind: str, rank: int, devices: Sequence[int] | None = None) -> torch.device:
    """``rank``: among those of this node. ``devices``: theirs; None: the first ones."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, rank if devices is None else devices[rank])


class SingleRank:
    rank = local_rank = 0
    size = local_size = 1
    in_graphs = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return x

    def minimum(self, value: int) -> int:
        return value


@dataclass
class RankGroup:
    """Ranks of ``torch.distributed``'s default group: one process each."""

    rank: int
    size: int
    device: torch.device  # on which numbers are exchanged
    local_rank: int
    local_size: int

    in_graphs = True

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 2:
            return self._sum_in_order(x.contiguous())
        dist.all_reduce(x)  # of two numbers there is one sum
        return x

    def _sum_in_order(self, x: Tensor) -> Tensor:
        if x.nbytes <= GATHERED_BYTES or x.numel() % self.size:
            parts = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
            return ordered_sum(parts)
        parts = x.new_empty((self.size, x.numel() // self.size))  # those of one piece
        dist.all_to_all_single(parts, x.view_as(parts))
        dist.all_gather_into_tensor(x.view(-1), ordered_sum(parts))
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts)
        return torch.cat(parts, dim=-1) if parts is not None else None

    def minimum(self, value: int) -> int:
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MIN)
        return int(box.item())


class GroupThroughHost(RankGroup):
    """Ranks that share GPUs where NCCL does not allow that: slow, and for debugging."""

    in_graphs = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(super().all_reduce(x.cpu()))

    def gather_columns(self, x: Tensor) -> Tensor | None:
        columns = super().gather_columns(x.cpu())
        return None if columns is None else columns.to(x.device)
