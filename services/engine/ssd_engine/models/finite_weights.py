"""Weights that are no numbers are found while they load: all that they touch is none, either.

Each part that is read is gone through once, as fast as it is copied. On a device nothing waits for
that; what it has found is asked for at the end. Only where it has found something are values
counted, in the files.
"""

import time
from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import Checkpoint
from ssd_engine.errors import ModelError
from ssd_engine.models.tensor_parallel import TensorParallel

MOST_NAMED = 3  # weights of an error
END_SECONDS = 600.0  # in which the first rank counts a weight's values, and ends all others


class FiniteWeights:
    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, num_rows: Mapping[str, int]
    ) -> None:
        """``num_rows``: of weights whose further rows only pad, and are never read."""
        self._checkpoint, self._dtype, self._num_rows = checkpoint, dtype, num_rows
        self._extremes: list[tuple[str, Tensor]] = []

    def look_at(self, name: str, part: Tensor, first_row: int = 0) -> None:
        """A part of a weight, from this row on."""
        rows = self._num_rows.get(name)
        used = part if rows is None else part[: max(0, rows - first_row)]
        if used.numel():
            self._extremes.append((name, torch.stack(used.aminmax())))  # NaN comes first

    def require(self, tp: TensorParallel) -> None:
        """Raises ModelError if a weight holds what is no number, on any rank. The first rank says
        which, at once: ranks agree on one, and the others wait until it ends them."""
        suspects, order = self._suspects(), sorted(self._checkpoint.entries)
        first = tp.minimum(min(map(order.index, suspects), default=len(order)))
        if first == len(order):
            return
        if tp.rank:
            time.sleep(END_SECONDS)
            raise RuntimeError(f"weight {order[first]}: not finite, and rank 0 has not ended")
        names = suspects or [order[first]]  # of another rank's part
        problems = [problem for name in names if (problem := self._problem(name))]
        more = f" (and {len(problems) - MOST_NAMED} more)" if len(problems) > MOST_NAMED else ""
        named = problems[:MOST_NAMED] or [_unseen(names[0], here=bool(suspects))]
        raise ModelError("; ".join(named) + more)

    def _suspects(self) -> list[str]:
        if not self._extremes:
            return []
        finite = torch.stack([extremes for _, extremes in self._extremes]).isfinite().all(dim=1)
        names = (name for name, _ in self._extremes)
        return [*dict.fromkeys(n for n, ok in zip(names, finite.tolist(), strict=True) if not ok)]

    def _problem(self, name: str) -> str:
        """What is wrong with a weight; empty where nothing is."""
        entry = self._checkpoint.entries[name]
        with safe_open(entry.file, framework="pt") as file:
            weight: Tensor = file.get_tensor(entry.name)[: self._num_rows.get(name)]
        where, count = f"{entry.file}: weight {name}", int((~weight.isfinite()).sum())
        if count:
            return (
                f"{where}: {count} of {weight.numel()} values are NaN or infinite; get or convert "
                "the checkpoint again"
            )
        if count := int((~weight.to(self._dtype).isfinite()).sum()):
            dtype = str(self._dtype).removeprefix("torch.")
            return f"{where}: {count} values are too large for {dtype}; --dtype bfloat16 holds them"
        return ""


def _unseen(name: str, here: bool) -> str:
    """What is wrong where this node's file has nothing wrong: its copy on the way to the device, or
    another node's file."""
    where = "once it was loaded" if here else "on another rank"
    return f"weight {name}: not finite {where}; get or convert the checkpoint again"
