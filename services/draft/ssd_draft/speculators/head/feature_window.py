"""The features that a target has told of one sequence, by position: those of the last ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Beyond it there are no hidden states, and a head's sums would overflow.
LARGEST = 1e8


class FeatureWindow:
    def __init__(self, window: int) -> None:
        """``window``: positions that are kept, up to the last one that was told."""
        self._window = window
        self._rows: dict[int, Tensor] = {}  # [width] each
        self.end = 0  # after the last position that was told
        self._oldest = 0  # before it nothing is kept

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def take(self, start: int, rows: Tensor) -> None:
        """Keeps rows [n, width] of positions from ``start`` on. The latest word counts; what no
        layer can have given is as if it had not been told."""
        passed_over = max(0, len(rows) - self._window)
        rows, start = rows[passed_over:], start + passed_over
        usable = ((rows.abs() <= LARGEST).all(dim=1)).tolist()
        for i, row in enumerate(rows.clone().unbind()):
            if usable[i] and start + i >= self._oldest:
                self._rows[start + i] = row
                self.end = max(self.end, start + i + 1)
        self._forget_before(self.end - self._window)

    def _forget_before(self, position: int) -> None:
        if position - self._oldest > len(self._rows):
            self._rows = {at: row for at, row in self._rows.items() if at >= position}
        else:
            for at in range(self._oldest, position):
                self._rows.pop(at, None)
        self._oldest = max(self._oldest, position)

    def first(self, begin: int, end: int) -> int | None:
        """The first position from ``begin`` on, and before ``end``, that was told."""
        begin = max(begin, self._oldest)
        return next((at for at in range(begin, min(end, self.end)) if at in self._rows), None)

    def last(self, end: int) -> int | None:
        """The last position before ``end`` that was told."""
        last = min(end, self.end) - 1
        return next((at for at in range(last, self._oldest - 1, -1) if at in self._rows), None)

    def stacked(self, positions: Sequence[int]) -> Tensor:
        """[positions, width]; all of them were told."""
        return torch.stack([self._rows[at] for at in positions])
