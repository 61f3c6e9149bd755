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


@dataclass(frozen=True)
class _Handed:
    key: RowsKey
    make: MakeRows
    mark: torch.cuda.Event | None


class Sender(PlaneEnd):
    """Sends rows, or drops them: the oldest first, when the receiver does not keep up."""

    def __init__(self, plane: AgreedPlane, max_queued: int = MAX_QUEUED) -> None:
        super().__init__(plane, sends=True)
        self._max_queued = max_queued
        self._queue: deque[_Handed] = deque()
        self.sent = 0
        self.dropped = 0
        self._thread.start()

    def send(self, key: RowsKey, rows: Tensor) -> bool:
        """Hand over rows [n, width]; nobody writes to them any more. False: dropped.

        Never waits, and a plane that is not up is no error: the receiver does without these rows.
        """
        check_rows(self._stream, rows)
        return self.send_made(key, lambda: rows)

    def send_made(self, key: RowsKey, make: MakeRows) -> bool:
        """As ``send``, for rows that the plane's thread makes from what nobody writes to."""
        with self._news:
            if self.state is not PlaneState.UP:
                self.dropped += 1
                return False
            if len(self._queue) >= self._max_queued:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(_Handed(key, make, self._plane.staging.mark()))
        self._wake.ring()
        return True

    def _forget_rows(self) -> None:
        self.dropped += len(self._queue)
        self._queue.clear()

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
            connection.wait()

    def _next(self) -> _Handed | None:
        with self._news:
            if not self._queue:
                return None
            self.sent += 1
            return self._queue.popleft()
