"""The end of a plane that receives what it has not asked for."""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from ssd_engine.tensor_plane.plane import AgreedPlane
from ssd_engine.tensor_plane.protocol.records import Announcement
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.receiving_end import ReceivingEnd

MAX_BYTES = 64 << 20


class RowsInbox(ReceivingEnd):
    """Keeps what has come until it is taken: of so many bytes the newest. It reads on, whether
    anybody takes or not, so that its sender never stalls."""

    def __init__(
        self,
        plane: AgreedPlane,
        max_bytes: int = MAX_BYTES,
        on_rows: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_rows`` is called in the plane's thread, when rows have come."""
        super().__init__(plane)
        self._max_bytes, self._on_rows = max_bytes, on_rows
        self._rows: deque[tuple[RowsKey, Tensor]] = deque()
        self.num_bytes = 0  # that wait to be taken
        self._thread.start()

    def __len__(self) -> int:
        """Sends that wait to be taken."""
        return len(self._rows)

    def take(self, max_bytes: int) -> list[tuple[RowsKey, Tensor]]:
        """What has come, in its order, up to so many bytes; what goes beyond is taken whole."""
        taken: list[tuple[RowsKey, Tensor]] = []
        if not self._rows:
            return taken
        with self._news:
            while self._rows and max_bytes > 0:
                taken.append(self._rows.popleft())
                self.num_bytes -= taken[-1][1].nbytes
                max_bytes -= taken[-1][1].nbytes
        return [(key, self._plane.staging.hand_out(rows)) for key, rows in taken]

    def _forget_rows(self) -> None:
        """What has come whole is as good as ever."""

    def _wants(self, announcement: Announcement) -> bool:
        return True

    def _keep(self, announcement: Announcement, rows: Tensor) -> None:
        with self._news:
            if self._state is not PlaneState.UP:
                return
            self._rows.append((announcement.key, rows))
            self.num_bytes += rows.nbytes
            self.received += len(rows)
            while self.num_bytes > self._max_bytes and len(self._rows) > 1:
                self.num_bytes -= self._rows.popleft()[1].nbytes
                self.discarded += 1
        self._on_rows()
