"""How the two ends of a plane know each other: by the secret and the terms of the link's handshake.

A secret admits one target and no more.
"""

import logging
import socket
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ssd_engine.process.secret_handshake import SecretHandshake, UnknownPeer
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.protocol.streams import RowsStream, check_same
from ssd_engine.tensor_plane.transports.connection import Connection, Wake, accept, dial

log = logging.getLogger(__name__)

HANDSHAKE = SecretHandshake(b"SSDPLANE", 2, host="draft", guest="target")
HELLO_SECONDS = 2.0


@dataclass(frozen=True)
class PlaneTerms:
    """What both ends of a plane must have in common."""

    kind: PlaneKind
    epoch: int
    stream: RowsStream

    def encode(self) -> bytes:
        return msgspec.json.encode(self._fields())

    def check(self, theirs: bytes) -> None:
        """Raises ValueError with the name of what the peer's terms differ in."""
        try:
            said = msgspec.json.decode(theirs, type=dict[str, int | str])
        except msgspec.MsgspecError as error:
            raise ValueError(f"the peer's terms cannot be read: {error}") from None
        check_same(self._fields(), said)

    def _fields(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "epoch": self.epoch, **self.stream.fields()}


def enter(
    place: tuple[int, str | tuple[str, int]],
    wake: Wake,
    terms: PlaneTerms,
    secret: bytes,
    deadline: float,
) -> Connection:
    """The target's side: dials the draft, at a family and an address."""
    connection = dial(*place, wake, deadline)
    try:
        terms.check(HANDSHAKE.enter(connection, secret, deadline, terms.encode()))
    except BaseException:
        connection.close()
        raise
    return connection


def admit(
    listener: socket.socket, wake: Wake, terms: PlaneTerms, secret: bytes, deadline: float
) -> Connection:
    """The draft's side: waits for the target. Whoever does not know the secret is sent away."""
    while True:
        connection = accept(listener, wake, deadline)
        soon = time.monotonic() + HELLO_SECONDS
        try:
            terms.check(HANDSHAKE.admit(connection, secret, soon, terms.encode()))
            return connection
        except (UnknownPeer, PlaneBroken, OSError) as error:
            log.warning("a stranger came to the tensor plane: %s", error)
            connection.close()
        except BaseException:
            connection.close()
            raise
