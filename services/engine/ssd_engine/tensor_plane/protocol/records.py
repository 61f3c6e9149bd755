"""The fixed-size records of a plane's connection, once both ends know each other.

    sender → receiver   what the kind needs to start, then an Announcement for every send
    receiver → sender   the serial of every announcement that was dealt with, in order

A peer's numbers are checked here or where they are used; none is ever an offset or an allocation
that the agreed stream does not bound.
"""

import struct
from dataclasses import dataclass

from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken

WINDOW = 4  # sends on their way that the receiver has not dealt with: the slots of the ring

_ANNOUNCEMENT = struct.Struct("<4sIQQI")
_SERIAL = struct.Struct("<Q")
_ROWS = b"ROWS"

ANNOUNCEMENT_BYTES = _ANNOUNCEMENT.size
SERIAL_BYTES = _SERIAL.size


@dataclass(frozen=True)
class Announcement:
    """Says that ``num_rows`` rows of ``key`` are there, or follow at once."""

    serial: int
    key: RowsKey
    num_rows: int

    def encode(self) -> bytes:
        key = self.key
        return _ANNOUNCEMENT.pack(_ROWS, self.num_rows, self.serial, key.sequence, key.round)

    @classmethod
    def decode(cls, data: bytes) -> "Announcement":
        magic, num_rows, serial, sequence, round_ = _ANNOUNCEMENT.unpack(data)
        if magic != _ROWS:
            raise PlaneBroken("an announcement is malformed")
        return cls(serial, RowsKey(sequence, round_), num_rows)


def decode_announcements(data: bytes) -> list[Announcement]:
    """``data`` holds whole records."""
    starts = range(0, len(data), ANNOUNCEMENT_BYTES)
    return [Announcement.decode(data[start : start + ANNOUNCEMENT_BYTES]) for start in starts]


def encode_serial(serial: int) -> bytes:
    return _SERIAL.pack(serial)


def decode_serials(data: bytes) -> list[int]:
    return [serial for (serial,) in _SERIAL.iter_unpack(data)]
