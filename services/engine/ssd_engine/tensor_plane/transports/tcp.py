"""Rows on the plane's own TCP connection, each send after its announcement.

A late or missing send leaves nothing posted behind it, and a peer that sends more than it announced
breaks the plane, not the process. A process group of gloo would serve the same hosts without these
two, and so is no kind of plane.
"""

from collections.abc import Sequence

from torch import Tensor

from ssd_engine.tensor_plane.protocol.records import Announcement
from ssd_engine.tensor_plane.protocol.rows import empty_rows, memory_of
from ssd_engine.tensor_plane.transports.carriers import Meeting


class TcpOut:
    def __init__(self, meeting: Meeting) -> None:
        self._connection = meeting.connection
        self._staging = meeting.staging

    def push(self, announcement: Announcement, rows: Tensor) -> None:
        data = memory_of(self._staging.to_host(rows))
        self._connection.write(announcement.encode())
        self._connection.write(data)

    def release(self, serial: int) -> None:
        """The kernel has taken the bytes already."""

    def close(self) -> None:
        """The connection is closed by its end."""


class TcpIn:
    at_once = 1

    def __init__(self, meeting: Meeting) -> None:
        self._connection = meeting.connection
        self._stream = meeting.terms.stream
        self._staging = meeting.staging

    def fetch(self, announcements: Sequence[Announcement]) -> None:
        """They come one after the other, each behind its announcement."""

    def take(self, announcement: Announcement) -> Tensor:
        return self._staging.to_device(self._read(announcement.num_rows))

    def skip(self, announcement: Announcement) -> None:
        for _ in range(announcement.num_rows):
            self._read(1)

    def _read(self, num_rows: int) -> Tensor:
        rows = empty_rows(self._stream, num_rows)
        self._connection.read_into(memory_of(rows))
        return rows

    def close(self) -> None:
        """The connection is closed by its end."""
