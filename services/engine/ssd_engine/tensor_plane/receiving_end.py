"""What every end of a plane that receives has in common: it reads all that is announced."""

from contextlib import ExitStack

from torch import Tensor

from ssd_engine.tensor_plane.end import PlaneEnd
from ssd_engine.tensor_plane.plane import CARRIERS, AgreedPlane
from ssd_engine.tensor_plane.protocol.records import (
    ANNOUNCEMENT_BYTES,
    Announcement,
    decode_announcements,
    encode_serial,
)
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneEvent, PlaneState


class ReceivingEnd(PlaneEnd):
    """Takes the rows that are wanted, and passes over all others."""

    def __init__(self, plane: AgreedPlane) -> None:
        super().__init__(plane, sends=False)
        self.received = 0  # rows that were kept
        self.discarded = 0  # sends that were not

    def _run(self, resources: ExitStack) -> None:
        meeting = self._plane.meet(self._wake, resources)
        connection, inward = meeting.connection, CARRIERS[meeting.terms.kind][1](meeting)
        resources.callback(inward.close)
        self._advance(PlaneEvent.CONNECTED)
        serial = 0
        while self._state is PlaneState.UP:
            if not connection.wait():
                continue
            announced = decode_announcements(connection.pending(ANNOUNCEMENT_BYTES, inward.at_once))
            for expected, announcement in enumerate(announced, serial):
                self._check(announcement, expected)
            inward.fetch(announced)
            for announcement in announced:
                if self._wants(announcement):
                    self._keep(announcement, inward.take(announcement))
                else:
                    inward.skip(announcement)
                connection.write(encode_serial(announcement.serial))
            serial += len(announced)

    def _check(self, announcement: Announcement, serial: int) -> None:
        if announcement.serial != serial:
            raise PlaneBroken(f"send {serial} was announced as {announcement.serial}")
        if not 1 <= announcement.num_rows <= self._stream.max_rows:
            raise PlaneBroken(f"{announcement.num_rows} rows were announced")

    def _wants(self, announcement: Announcement) -> bool:
        """In the thread: whether these rows are read at all; counts those that are not."""
        raise NotImplementedError

    def _keep(self, announcement: Announcement, rows: Tensor) -> None:
        """In the thread: rows that were wanted are there."""
        raise NotImplementedError
