"""The features of one sequence that the target has: those of its last positions, without a gap,
and before them those of blocks that are kept."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_engine.tensor_plane.host_rows import HostRows
from ssd_target.speculation.endpoints.kept_features import KeptFeatures

# Pieces of prompts stay where they were copied to: nothing is to be waited for while a device has
# little to do. Those of rounds are small, and lie among those of other sequences: they are copied
# once more, side by side, so that there are few pieces.
FEW_ROWS = 64


class FeatureText:
    def __init__(
        self,
        kept: KeptFeatures,
        block_size: int,
        is_cached: Callable[[int], bool] = lambda name: True,
    ) -> None:
        """``is_cached``: whether the pool still has a block of this name."""
        self._kept, self._block_size, self._is_cached = kept, block_size, is_cached
        self._pieces: list[HostRows] = []
        self._starts: list[int] = []  # their first positions
        self._together = _SideBySide()
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
        self._settle_last()  # a step has ended since it came
        self._pieces.append(rows.part(known, len(rows)))
        self._starts.append(self.end)
        self.end += len(rows) - known
        self.num_bytes += self._pieces[-1].num_bytes

    def follow(self, names: Sequence[int]) -> None:
        """The blocks that hold its tokens now. When it comes back after it was set aside, they have
        other names."""
        if names is not self.names:
            self.names, self._num_kept = names, 0

    def _settle_last(self) -> None:
        if not self._pieces or len(self._pieces[-1]) > FEW_ROWS:
            return
        last = self._pieces.pop()
        before = self._pieces[-1] if self._pieces else None
        rows, goes_on = self._together.add(last, before)
        if goes_on:
            self._starts.pop()
            self._pieces[-1] = rows
        else:
            self._pieces.append(rows)

    def _add_before(self, start: int, rows: HostRows) -> None:
        self._pieces.insert(0, rows)
        self._starts.insert(0, start)
        self.start, self._num_kept = start, min(self._num_kept, start // self._block_size)
        self.num_bytes += rows.num_bytes

    def _begin(self, start: int) -> None:
        self._pieces.clear()
        self._starts.clear()
        self.start = self.end = start
        self.num_bytes = 0
        self._num_kept = start // self._block_size

    def prune(self, most: int) -> None:
        """Leaves the last positions: so many, and the rest of a prompt's piece that a device has
        copied, and what is still to be kept with its block."""
        if self._kept.keeps and self.left_to_keep:
            most = max(most, self.end - self._num_kept * self._block_size)
        count, start = 0, self.start
        while count < len(self._pieces) and self.end - start - len(self._pieces[count]) >= most:
            self.num_bytes -= self._pieces[count].num_bytes
            start += len(self._pieces[count])
            count += 1
        del self._pieces[:count]
        del self._starts[:count]
        self.start = start
        excess = self.end - self.start - most
        if excess > most // 4 and not self._pieces[0].is_borrowed:
            oldest = self._pieces[0]
            self._pieces[0] = rest = HostRows(oldest.get()[excess:].clone())
            self.start += excess
            self._starts[0] = self.start
            self.num_bytes += rest.num_bytes - oldest.num_bytes

    @property
    def left_to_keep(self) -> int:
        """Blocks that have entered the prefix cache and were not looked at yet."""
        return max(0, min(len(self.names), self.end // self._block_size) - self._num_kept)

    def keep(self, most: int) -> int:
        """Keeps blocks that have entered the prefix cache, and are still there, as far as their
        features are here: so many at the most. Returns how many were copied."""
        size, copied = self._block_size, 0
        while copied < most and self.left_to_keep:
            name, begin = self.names[self._num_kept], self._num_kept * size
            if begin >= self.start and name not in self._kept and self._is_cached(name):
                self._kept.put(name, HostRows(self._rows(begin, begin + size)))
                copied += 1
            self._num_kept += 1
        return copied

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
        found: list[HostRows] = []
        number = max(0, bisect_right(self._starts, begin) - 1)
        while number < len(self._pieces) and self._starts[number] < end:
            piece, at = self._pieces[number], self._starts[number]
            if begin < at + len(piece):
                found.append(piece.part(max(0, begin - at), min(len(piece), end - at)))
            number += 1
        return found

    def _rows(self, begin: int, end: int) -> Tensor:
        return torch.cat([piece.get() for piece in self._pieces_here(begin, end)])


class _SideBySide:
    """Copies small pieces that follow each other into memory that lies together."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None  # [FEW_ROWS, width]
        self._used = 0  # rows of it: nobody writes there any more
        self._run = 0  # of them, where the piece begins that was returned last
        self._last: HostRows | None = None

    def add(self, piece: HostRows, before: HostRows | None) -> tuple[HostRows, bool]:
        """The piece in other memory; with the one before it, and True, where that lies there."""
        rows = piece.get()
        goes_on = before is not None and before is self._last
        if self._memory is None or self._used + len(rows) > FEW_ROWS:
            self._memory = rows.new_empty(FEW_ROWS, rows.shape[1])
            self._used, goes_on = 0, False
        if not goes_on:
            self._run = self._used
        end = self._used + len(rows)
        self._memory[self._used : end] = rows
        self._used = end
        self._last = HostRows(self._memory[self._run : end])
        return self._last, goes_on
