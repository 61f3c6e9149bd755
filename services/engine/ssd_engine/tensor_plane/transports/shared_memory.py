"""Rows through a ring of slots in memory that two processes of one host share.

The segment is a memory file without a name, made by the sender and handed to the receiver as an
open file: there is nothing to unlink, at whatever moment either of them is killed. Send number n
lies in slot n mod WINDOW, so no offset is ever taken from the peer. Announcements and their answers
travel on the connection, which gives a wait without polling, and the order "rows before
announcement" that plain stores to shared memory do not have on every processor.

The sender writes through a mapping: the file is its own, allocated in full and sealed. The receiver
reads it as a file: whatever a peer does to a file, a read returns, while a mapping may fault.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_engine.tensor_plane.protocol.records import WINDOW, Announcement
from ssd_engine.tensor_plane.protocol.rows import dtype_of, empty_rows, memory_of
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.transports.carriers import Meeting


class SharedMemoryOut:
    def __init__(self, meeting: Meeting) -> None:
        self._connection = meeting.connection
        stream = meeting.terms.stream
        size = WINDOW * stream.max_bytes
        file = os.memfd_create("ssd-plane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
            mapping = mmap.mmap(file, size)
            self._connection.send_file(file)
        finally:
            os.close(file)
        self._slots = torch.frombuffer(mapping, dtype=dtype_of(stream)).view(
            WINDOW, stream.max_rows, stream.width
        )

    def push(self, announcement: Announcement, rows: Tensor) -> None:
        self._slots[announcement.serial % WINDOW, : announcement.num_rows].copy_(rows)
        self._connection.write(announcement.encode())

    def release(self, serial: int) -> None:
        """Its slot is free again by the window alone."""

    def close(self) -> None:
        del self._slots  # and with it the mapping


class SharedMemoryIn:
    at_once = 1

    def __init__(self, meeting: Meeting) -> None:
        self._stream = meeting.terms.stream
        self._staging = meeting.staging
        self._file = meeting.connection.receive_file()
        try:
            _check_segment(self._file, WINDOW * self._stream.max_bytes)
        except BaseException:
            self.close()
            raise

    def fetch(self, announcements: Sequence[Announcement]) -> None:
        """They are there."""

    def take(self, announcement: Announcement) -> Tensor:
        rows = empty_rows(self._stream, announcement.num_rows)
        left = memory_of(rows)
        offset = announcement.serial % WINDOW * self._stream.max_bytes
        while len(left):
            count = os.preadv(self._file, [left], offset)
            if count == 0:
                raise PlaneBroken("the segment ends before its slots do")
            left, offset = left[count:], offset + count
        return self._staging.to_device(rows)

    def skip(self, announcement: Announcement) -> None:
        """The slot is simply not read."""

    def close(self) -> None:
        os.close(self._file)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _check_segment(file: int, size: int) -> None:
    """Only memory files have seals: a pipe or a file of some other kind could block a read."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PlaneBroken("the peer's segment is not a memory file") from error
    if seals & _seals() != _seals() or os.fstat(file).st_size != size:
        raise PlaneBroken("the peer's segment is not the one that was agreed")
