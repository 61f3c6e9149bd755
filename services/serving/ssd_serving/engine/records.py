"""What the front and the engine of any service say to each other: small binary records."""

from collections.abc import Callable
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


class AboutLink(Record, frozen=True):
    """A record about one link."""

    link: int


class LinkGone(AboutLink, frozen=True):
    """The link is gone for good, and so are its sequences."""


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
