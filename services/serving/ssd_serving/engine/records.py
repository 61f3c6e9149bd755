"""What the front and the engine of any service say to each other: small binary records."""

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Ready(Record, frozen=True):
    num_blocks: int
    load_seconds: float


class Beat(Record, frozen=True):
    """The engine's loop goes round, and has nothing else to say."""


class Fatal(Record, frozen=True):
    """The engine cannot go on; the message is for the operator."""

    message: str
    bad_config: bool  # the operator's options, not an accident


_encoder = msgspec.msgpack.Encoder()


def encode(record: Any) -> bytes:
    return _encoder.encode(record)
