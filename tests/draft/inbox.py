"""The draft's end of a plane by which a head is told; what comes on it is up to a test."""

from torch import Tensor

from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState


class Inbox:
    def __init__(self) -> None:
        self.rows: list[tuple[RowsKey, Tensor]] = []
        self.state, self.came_up, self.reason = PlaneState.UP, True, ""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, max_bytes: int) -> list[tuple[RowsKey, Tensor]]:
        taken: list[tuple[RowsKey, Tensor]] = []
        while self.rows and max_bytes > 0:
            taken.append(self.rows.pop(0))
            max_bytes -= taken[-1][1].nbytes
        return taken

    def close(self) -> None:
        pass
