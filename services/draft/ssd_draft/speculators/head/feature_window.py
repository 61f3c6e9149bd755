"""The features that a target has told of one sequence, by position: those of the last ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Beyond it there are no hidden states, and a head's sums would overflow.
LARGEST = 1e8


class FeatureWindow:
    """A ring that is written in place: it holds no memory but its own, however rows have come."""

    def __init__(self, window: int) -> None:
        """``window``: positions that are kept, up to the last one that was told."""
        self.window = window
        self._rows: Tensor | None = None  # [window, width]; that of position p at p % window
        self._positions = [-1] * window  # by place
        self.end = 0  # after the last position that was told

    @property
    def _oldest(self) -> int:
        """Before it nothing is kept."""
        return max(0, self.end - self.window)

    def __contains__(self, position: int) -> bool:
        is_kept = self._positions[position % self.window] == position
        return is_kept and position >= self._oldest

    def take(self, start: int, rows: Tensor) -> None:
        """Keeps rows [n, width] of positions from ``start`` on. The latest word counts; what no
        layer can have given is as if it had not been told."""
        passed_over = max(0, len(rows) - self.window)
        rows, start = rows[passed_over:], start + passed_over
        usable = ((rows.abs() <= LARGEST).all(dim=1)).tolist()
        kept = [i for i, fine in enumerate(usable) if fine and start + i >= self._oldest]
        if not kept:
            return
        if self._rows is None:
            self._rows = rows.new_empty(self.window, rows.shape[1])
        places = [(start + i) % self.window for i in kept]
        told = rows if len(kept) == len(rows) else rows[kept]
        self._rows.index_copy_(0, torch.tensor(places, device=rows.device), told)
        for place, i in zip(places, kept, strict=True):
            self._positions[place] = start + i
        self.end = max(self.end, start + kept[-1] + 1)

    def first(self, begin: int, end: int) -> int | None:
        """The first position from ``begin`` on, and before ``end``, that was told."""
        begin = max(begin, self._oldest)
        return next((at for at in range(begin, min(end, self.end)) if at in self), None)

    def last(self, end: int) -> int | None:
        """The last position before ``end`` that was told."""
        last = min(end, self.end) - 1
        return next((at for at in range(last, self._oldest - 1, -1) if at in self), None)

    def stacked(self, positions: Sequence[int]) -> Tensor:
        """[positions, width]; all of them were told."""
        if self._rows is None:
            raise RuntimeError("features of a sequence that was told none")
        places = [position % self.window for position in positions]
        return self._rows[torch.tensor(places, device=self._rows.device)]
