"""Records of a pipe, as far as they have come. Nothing here waits for the other side."""

import os
import socket
import struct
from multiprocessing.connection import Connection

from ssd_engine.errors import SSDError

HEADER = struct.Struct("!i")  # the length, as multiprocessing.connection writes it before a message
MOST_READ = 1 << 18  # bytes at a time, so that others of the event loop have their turn


class PipeEnded(Exception):
    """The other side is gone."""


class RecordReader:
    """Reads a pipe that its event loop says can be read. Its other side may stop at any byte."""

    def __init__(self, pipe: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        self._buffer = memoryview(bytearray(MOST_READ))
        self._unread = bytearray()  # begins with a header

    def read(self) -> list[bytes]:
        """The records that are complete by now; raises PipeEnded."""
        try:
            # Not the socket, but this call does not wait: writers of the same pipe may.
            size = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PipeEnded from error
        if not size:
            raise PipeEnded
        self._unread += self._buffer[:size]
        return self._take_complete()

    def _take_complete(self) -> list[bytes]:
        records, begin = [], 0
        while (end := self._end_of_record(begin)) <= len(self._unread):
            records.append(bytes(self._unread[begin + HEADER.size : end]))
            begin = end
        del self._unread[:begin]
        return records

    def _end_of_record(self, begin: int) -> int:
        """Where the record ends, at least; it begins with its header."""
        after_header = begin + HEADER.size
        if after_header > len(self._unread):
            return after_header
        (length,) = HEADER.unpack_from(self._unread, begin)
        if length < 0:
            raise SSDError("a record has 2 GiB or more")
        return after_header + length
