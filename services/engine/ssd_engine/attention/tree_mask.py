"""What the rows of a tree see of its tail, as bits, made on the device from a few integers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.attention.base import TreeRun


def packed_masks(runs: Sequence[TreeRun], device: torch.device) -> tuple[Tensor, list[int]]:
    """[bytes] of TreeRun.visible, row after row, lowest bit first; and how many each run has."""
    packed = [_packed(run, device) for run in runs]
    return torch.cat(packed), [len(each) for each in packed]


def _packed(run: TreeRun, device: torch.device) -> Tensor:
    limits = torch.tensor(run.limits).to(device, non_blocking=True)[:, None]
    rows = torch.arange(run.length, device=device)[:, None]
    chain = torch.arange(run.context, max(run.limits) + 1, device=device)
    scratch = torch.arange(len(run.scratch), device=device)
    sees = torch.cat((chain <= limits, scratch % run.length == rows), dim=1).flatten()
    bits = sees.new_zeros(-(-len(sees) // 8) * 8)
    bits[: len(sees)] = sees
    shifted = bits.view(-1, 8).to(torch.uint8) << torch.arange(8, device=device, dtype=torch.uint8)
    return shifted.sum(dim=1, dtype=torch.uint8)
