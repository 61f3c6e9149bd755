"""Features of whole blocks of the prefix cache, in the host's memory: what is not computed again
can be told again. Blocks have the names that they have in the block pool, which are never used
again."""

from collections import OrderedDict
from collections.abc import Sequence

from ssd_engine.tensor_plane.host_rows import HostRows


class KeptFeatures:
    """Within a budget, those that were used last."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[int, HostRows] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def put(self, name: int, rows: HostRows) -> None:
        """``rows`` have memory of their own."""
        if name in self._blocks or rows.num_bytes > self._max_bytes:
            return
        self._blocks[name] = rows
        self.num_bytes += rows.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._blocks.popitem(last=False)[1].num_bytes

    def get(self, name: int) -> HostRows | None:
        rows = self._blocks.get(name)
        if rows is not None:
            self._blocks.move_to_end(name)
        return rows

    def first_of_run(self, names: Sequence[int]) -> int:
        """The place in a path of blocks from which on all are kept; that after the last block
        where the last is not."""
        first = len(names)
        while first and names[first - 1] in self._blocks:
            first -= 1
        return first

    def forget(self, name: int) -> None:
        """The block has left the prefix cache."""
        rows = self._blocks.pop(name, None)
        if rows is not None:
            self.num_bytes -= rows.num_bytes

    def clear(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0
