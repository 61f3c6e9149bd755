"""The fixed-size records of a plane's connection.

    target → draft   Hello once, then the serial of every announcement that was dealt with, in order
    draft → target   Welcome once, what the kind needs to start, then an Announcement for every send

A peer's numbers are checked here or where they are used; none is ever an offset or an allocation
that the agreed format does not bound.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken

VERSION = 1
WINDOW = 4  # sends on their way that the target has not dealt with: the slots of the ring
PROOF_BYTES = 32
SECRET_BYTES = 32

_HELLO = struct.Struct("<8sHHIIQ32s")
_WELCOME = struct.Struct("<8sI32s")
_ANNOUNCEMENT = struct.Struct("<4sIQQII")
_SERIAL = struct.Struct("<Q")
_MAGIC = b"SSDPLANE"
_ROWS = b"ROWS"

HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
ANNOUNCEMENT_BYTES = _ANNOUNCEMENT.size
SERIAL_BYTES = _SERIAL.size


class GreetingVerdict(IntEnum):
    ADMITTED = 0
    WRONG_SECRET = 1
    OTHER_VERSION = 2
    OTHER_EPOCH = 3
    OTHER_FORMAT = 4


@dataclass(frozen=True)
class Hello:
    dtype: int
    vocab_size: int
    max_rows: int
    epoch: int
    version: int = VERSION
    proof: bytes = bytes(PROOF_BYTES)

    def encode(self) -> bytes:
        return _HELLO.pack(
            _MAGIC,
            self.version,
            self.dtype,
            self.vocab_size,
            self.max_rows,
            self.epoch,
            self.proof,
        )

    @classmethod
    def decode(cls, data: bytes) -> "Hello":
        magic, version, dtype, vocab_size, max_rows, epoch, proof = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise PlaneBroken("the peer does not speak as a plane does")
        return cls(dtype, vocab_size, max_rows, epoch, version, proof)


@dataclass(frozen=True)
class Welcome:
    verdict: GreetingVerdict
    proof: bytes = bytes(PROOF_BYTES)

    def encode(self) -> bytes:
        return _WELCOME.pack(_MAGIC, self.verdict, self.proof)

    @classmethod
    def decode(cls, data: bytes) -> "Welcome":
        magic, verdict, proof = _WELCOME.unpack(data)
        if magic != _MAGIC or verdict not in set(GreetingVerdict):
            raise PlaneBroken("the peer does not speak as a plane does")
        return cls(GreetingVerdict(verdict), proof)


@dataclass(frozen=True)
class Announcement:
    """Says that ``num_rows`` rows of ``key`` are there, or follow at once."""

    serial: int
    key: RowsKey
    num_rows: int

    def encode(self) -> bytes:
        key = self.key
        return _ANNOUNCEMENT.pack(
            _ROWS, self.num_rows, self.serial, key.sequence, key.round, key.first_row
        )

    @classmethod
    def decode(cls, data: bytes) -> "Announcement":
        magic, num_rows, serial, sequence, round_, first_row = _ANNOUNCEMENT.unpack(data)
        if magic != _ROWS:
            raise PlaneBroken("an announcement is malformed")
        return cls(serial, RowsKey(sequence, round_, first_row), num_rows)


def encode_serial(serial: int) -> bytes:
    return _SERIAL.pack(serial)


def decode_serials(data: bytes) -> list[int]:
    return [serial for (serial,) in _SERIAL.iter_unpack(data)]
