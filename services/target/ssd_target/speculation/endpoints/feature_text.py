"""The features of one sequence that the target has: those of its last positions, without a gap,
and before them those of blocks that are kept."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.tensor_plane.host_rows import HostRows
from ssd_target.speculation.endpoints.kept_features import KeptFeatures

# Pieces of prompts stay where they were copied to: nothing is to be waited for while a device has
# little to do. Those of rounds are small, and lie among those of other sequences.
FEW_ROWS = 64


class FeatureText:
    def __init__(self, kept: KeptFeatures, block_size: int) -> None:
        self._kept, self._block_size = kept, block_size
        self._pieces: deque[HostRows] = deque()
        self.start = self.end = 0  # positions of what follows the kept blocks
        self.num_bytes = 0
        self.names: Sequence[int] = ()  # of the blocks that hold its tokens
        self._num_kept = 0  # blocks, the first ones, that were looked at for being kept

    # What comes

    def add(self, start: int, rows: HostRows) -> None:
        """What is known already is passed over; a gap begins anew."""
        if self._pieces and start + len(rows) == self.start:
            self._add_before(start, rows)
            return
        if start > self.end or not self._pieces:
            self._begin(start)
        known = self.end - start
        if known >= len(rows):
            return
        if self._pieces and len(self._pieces[-1]) <= FEW_ROWS:  # a step has ended since
            self._pieces.append(self._pieces.pop().settled())
        self._pieces.append(rows.part(known, len(rows)))
        self.end += len(rows) - known
        self.num_bytes += self._pieces[-1].num_bytes

    def _add_before(self, start: int, rows: HostRows) -> None:
        self._pieces.appendleft(rows)
        self.start, self._num_kept = start, min(self._num_kept, start // self._block_size)
        self.num_bytes += rows.num_bytes

    def _begin(self, start: int) -> None:
        self._pieces.clear()
        self.start = self.end = start
        self.num_bytes = 0
        self._num_kept = start // self._block_size

    def prune(self, most: int) -> None:
        """Leaves the last positions: so many, and the rest of a prompt's piece that a device has
        copied."""
        while self._pieces and self.end - self.start - len(self._pieces[0]) >= most:
            oldest = self._pieces.popleft()
            self.start += len(oldest)
            self.num_bytes -= oldest.num_bytes
        excess = self.end - self.start - most
        if excess > most // 4 and not self._pieces[0].is_borrowed:
            oldest = self._pieces.popleft()
            rest = HostRows(oldest.get()[excess:].clone())
            self._pieces.appendleft(rest)
            self.start += excess
            self.num_bytes += rest.num_bytes - oldest.num_bytes

    def keep(self) -> None:
        """Keeps blocks that have entered the prefix cache, as far as their features are here."""
        size = self._block_size
        while self._num_kept < len(self.names) and (self._num_kept + 1) * size <= self.end:
            begin = self._num_kept * size
            if begin >= self.start:
                rows = HostRows(self._rows(begin, begin + size))
                self._kept.put(self.names[self._num_kept], rows)
            self._num_kept += 1

    # What is told

    @property
    def first(self) -> int:
        """The first position of the run that ends with the last one."""
        blocks = -(-self.start // self._block_size)  # that hold what is before
        if blocks > len(self.names):
            return self.start
        kept = self._kept.first_of_run(self.names[:blocks]) * self._block_size
        return min(kept, self.start)

    def pieces(self, begin: int, end: int) -> list[HostRows]:
        """Rows from ``begin`` on, up to ``end`` at the most; none where they are not here."""
        if begin >= self.start:
            return self._pieces_here(begin, end)
        found: list[HostRows] = []
        size = self._block_size
        end = min(end, self.start)
        while begin < end:
            block = self._kept.get(self.names[begin // size])
            if block is None:
                break
            found.append(block.part(begin % size, min(size, begin % size + end - begin)))
            begin += len(found[-1])
        return found

    def _pieces_here(self, begin: int, end: int) -> list[HostRows]:
        found, at = [], self.start
        for piece in self._pieces:
            if at >= end:
                break
            if at + len(piece) > begin:
                found.append(piece.part(max(0, begin - at), min(len(piece), end - at)))
            at += len(piece)
        return found

    def _rows(self, begin: int, end: int) -> Tensor:
        return torch.cat([piece.get() for piece in self._pieces_here(begin, end)])
