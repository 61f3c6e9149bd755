"""The end of a plane that receives what it has asked for."""

from dataclasses import dataclass

from torch import Tensor

from ssd_engine.tensor_plane.plane import AgreedPlane
from ssd_engine.tensor_plane.protocol.records import Announcement
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneState
from ssd_engine.tensor_plane.receiving_end import ReceivingEnd

MAX_EXPECTED = 256
# Rows answer expectations one to one; a sender of this many more is flooding the receiver.
MAX_UNASKED = 1024


@dataclass
class _Expected:
    num_rows: int
    rows: Tensor | None = None


class Receiver(ReceivingEnd):
    """Keeps the rows that are expected until they are received, and no others."""

    def __init__(self, plane: AgreedPlane, max_expected: int = MAX_EXPECTED) -> None:
        super().__init__(plane)
        self._max_expected = max_expected
        self._expected: dict[RowsKey, _Expected] = {}  # oldest first
        self._asked = 0
        self._thread.start()

    def expect(self, key: RowsKey, num_rows: int) -> None:
        """These rows are wanted: keep them when they come. Said before they are sent.

        Rows that come before they are expected are lost. Each expectation ends in one receive;
        beyond ``max_expected`` of them the oldest is given up.
        """
        self._stream.check_count(num_rows)
        with self._news:
            if self.state in (PlaneState.CONNECTING, PlaneState.UP):
                self._expect(key, num_rows)

    def receive(self, key: RowsKey, num_rows: int, timeout_s: float) -> Tensor | None:
        """Rows [num_rows, width], or None when they are not there in time.

        Either way this key is over: what comes for it later is discarded. Raises PlaneBroken when
        there is no use in asking again; until the plane is up it returns None at once.
        """
        self._stream.check_count(num_rows)
        with self._news:
            expected = self._expect(key, num_rows)
            if self.state is PlaneState.UP and timeout_s > 0:
                self._news.wait_for(
                    lambda: expected.rows is not None or self._state is not PlaneState.UP, timeout_s
                )
            self._expected.pop(key, None)
            if self._state in (PlaneState.BROKEN, PlaneState.CLOSED):
                raise PlaneBroken(self.reason or "the plane is closed")
        rows = expected.rows
        return None if rows is None else self._plane.staging.hand_out(rows)

    def _expect(self, key: RowsKey, num_rows: int) -> _Expected:
        known = self._expected.get(key)
        if known is not None and known.num_rows == num_rows:
            return known
        self._asked += 1
        while len(self._expected) >= self._max_expected:
            del self._expected[next(iter(self._expected))]
        expected = self._expected[key] = _Expected(num_rows)
        return expected

    def _forget_rows(self) -> None:
        self._expected.clear()

    def _check(self, announcement: Announcement, serial: int) -> None:
        super()._check(announcement, serial)
        if serial > self._asked + MAX_UNASKED:
            raise PlaneBroken("the sender sends what nobody asked for")

    def _wants(self, announcement: Announcement) -> bool:
        with self._news:
            expected = self._expected.get(announcement.key)
            wanted = expected is not None and expected.num_rows == announcement.num_rows
            self.discarded += not wanted
            return wanted

    def _keep(self, announcement: Announcement, rows: Tensor) -> None:
        with self._news:
            expected = self._expected.get(announcement.key)
            if expected is None or expected.num_rows != announcement.num_rows:
                self.discarded += 1  # given up while the rows were on their way
                return
            expected.rows = rows
            self.received += len(rows)
            self._news.notify_all()
