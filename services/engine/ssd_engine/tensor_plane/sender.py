"""The end of a plane that sends."""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_engine.tensor_plane.end import PlaneEnd
from ssd_engine.tensor_plane.plane import CARRIERS, AgreedPlane
from ssd_engine.tensor_plane.protocol.records import (
    SERIAL_BYTES,
    WINDOW,
    Announcement,
    decode_serials,
)
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey, check_rows
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneEvent, PlaneState

MAX_QUEUED = 64
MAX_QUEUED_BYTES = 64 << 20


@dataclass(frozen=True)
class _Handed:
    key: RowsKey
    make: MakeRows
    mark: torch.cuda.Event | None
    num_bytes: int


class Sender(PlaneEnd):
    """Sends rows, or drops them: the oldest first, when the receiver does not keep up."""

    def __init__(
        self,
        plane: AgreedPlane,
        max_queued: int = MAX_QUEUED,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        super().__init__(plane, sends=True)
        self._max_queued, self._max_queued_bytes = max_queued, max_queued_bytes
        self._queue: deque[_Handed] = deque()
        self.queued_bytes = 0
        self.sent = self.dropped = 0  # sends
        self.sent_rows = self.sent_bytes = 0
        self._thread.start()

    def send(self, key: RowsKey, rows: Tensor) -> bool:
        """Hand over rows [n, width]; nobody writes to them any more. False: dropped.

        Never waits, and a plane that is not up is no error: the receiver does without these rows.
        """
        check_rows(self._stream, rows)
        return self.send_made(key, lambda: rows, len(rows))

    def send_made(
        self, key: RowsKey, make: MakeRows, num_rows: int = 0, complete: bool = False
    ) -> bool:
        """As ``send``, for rows that the plane's thread makes from what nobody writes to.

        ``num_rows``: as far as it is known, for the bound in bytes. ``complete``: nothing that the
        device has still to compute is waited for.
        """
        num_bytes = num_rows * self._stream.row_bytes
        with self._news:
            if self.state is not PlaneState.UP:
                self.dropped += 1
                return False
            while self._queue and not self._has_room(num_bytes):
                self._forget_oldest()
            mark = None if complete else self._plane.staging.mark()
            self._queue.append(_Handed(key, make, mark, num_bytes))
            self.queued_bytes += num_bytes
        self._wake.ring()
        return True

    def has_room(self, num_rows: int) -> bool:
        """Whether so many rows can be handed over now, and none is dropped for them."""
        with self._news:
            room = self._has_room(num_rows * self._stream.row_bytes)
            return self.state is PlaneState.UP and (room or not self._queue)

    def _has_room(self, num_bytes: int) -> bool:
        fits = self.queued_bytes + num_bytes <= self._max_queued_bytes
        return fits and len(self._queue) < self._max_queued

    def _forget_oldest(self) -> None:
        self.queued_bytes -= self._queue.popleft().num_bytes
        self.dropped += 1

    def _forget_rows(self) -> None:
        while self._queue:
            self._forget_oldest()

    def _run(self, resources: ExitStack) -> None:
        meeting = self._plane.meet(self._wake, resources)
        connection, out = meeting.connection, CARRIERS[meeting.terms.kind][0](meeting)
        resources.callback(out.close)
        self._advance(PlaneEvent.CONNECTED)
        pushed = released = 0
        while self._state is PlaneState.UP:
            for serial in decode_serials(connection.pending(SERIAL_BYTES)):
                if serial != released or released >= pushed:
                    raise PlaneBroken("the receiver answers what it was not sent")
                out.release(serial)
                released += 1
            while pushed - released < WINDOW and (handed := self._next()) is not None:
                with self._plane.staging.after(handed.mark):
                    rows = handed.make()
                    check_rows(self._stream, rows)
                    out.push(Announcement(pushed, handed.key, len(rows)), rows)
                pushed += 1
                self.sent_rows += len(rows)
                self.sent_bytes += rows.nbytes
            connection.wait()

    def _next(self) -> _Handed | None:
        with self._news:
            if not self._queue:
                return None
            self.sent += 1
            handed = self._queue.popleft()
            self.queued_bytes -= handed.num_bytes
            return handed
