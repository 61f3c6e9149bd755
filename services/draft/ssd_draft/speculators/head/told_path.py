"""The cached path of a head: which of its rows were computed with the target's features."""

from collections.abc import Sequence

from ssd_engine.kvcache.block_pool import ROOT, BlockPool
from ssd_engine.kvcache.cached_path import CachedPath


class ToldPath(CachedPath):
    """Other rows went on from the head's own states, and are computed again once they are told.

    Only blocks all of whose rows were told enter the prefix cache.
    """

    def __init__(
        self,
        pool: BlockPool,
        tokens: list[int],
        ahead: int,
        max_tokens: int,
        root: int | None,
        spare: int = 0,
    ) -> None:
        """``root`` of what is shared; None: the path begins empty, and none of it is shared."""
        self._shares = root is not None
        self._told = bytearray()  # of each row 1 where it was computed as it was told
        shared = [] if root is None else tokens
        super().__init__(pool, shared, ahead, max_tokens, ROOT if root is None else root, spare)
        self._told += bytes([1]) * self.num_known
        self.num_final = self.num_known  # rows, the first ones, that were all told

    @property
    def _num_final(self) -> int:
        return min(self.num_known, self.num_final) if self._shares else 0

    def is_told(self, row: int) -> bool:
        return row < len(self._told) and self._told[row] == 1

    @property
    def told_end(self) -> int:
        """The row after the last one that was computed as it was told."""
        return self._told.rfind(1) + 1

    def computing(self, begin: int, told: Sequence[bool]) -> None:
        """The next forward computes these rows; all after them are gone."""
        self._told = self._told[:begin].ljust(begin, b"\0") + bytes(told)
        self.num_final = min(self.num_final, begin)
        while self.is_told(self.num_final):
            self.num_final += 1
