"""How the two ends of a plane know each other: by the secret and the epoch of the handshake.

Neither end sends the secret; each proves that it has it. A proof is of no use twice, since a
secret admits one target and no more.
"""

import hmac
import logging
import socket
import time
from dataclasses import dataclass, replace

from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.records import (
    HELLO_BYTES,
    WELCOME_BYTES,
    GreetingVerdict,
    Hello,
    Welcome,
)
from ssd_engine.tensor_plane.protocol.rows import DTYPES, RowsFormat
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.transports.connection import Connection, Wake, accept

log = logging.getLogger(__name__)

HELLO_SECONDS = 2.0


@dataclass(frozen=True)
class PlaneAgreement:
    """What both ends must agree on."""

    kind: PlaneKind
    epoch: int
    format: RowsFormat

    def hello(self) -> Hello:
        rows = self.format
        return Hello(DTYPES.index(rows.dtype), rows.vocab_size, rows.max_rows, self.epoch)


def greet(connection: Connection, terms: PlaneAgreement, secret: bytes, deadline: float) -> None:
    """The target's side; raises PlaneBroken when it is not admitted."""
    hello = terms.hello()
    proof = _proof(secret, b"target", terms.kind, hello)
    connection.write(replace(hello, proof=proof).encode())
    welcome = Welcome.decode(connection.read(WELCOME_BYTES, deadline))
    if welcome.verdict is not GreetingVerdict.ADMITTED:
        raise PlaneBroken(f"refused by the draft: {welcome.verdict.name.lower().replace('_', ' ')}")
    if not hmac.compare_digest(welcome.proof, _proof(secret, b"draft", terms.kind, hello)):
        raise PlaneBroken("the peer does not know the secret")


def admit(
    listener: socket.socket, wake: Wake, terms: PlaneAgreement, secret: bytes, deadline: float
) -> Connection:
    """The draft's side: waits for the target. Whoever does not know the secret is sent away."""
    while True:
        connection = accept(listener, wake, deadline)
        try:
            verdict = _judge(connection, terms, secret)
        except (PlaneBroken, OSError) as error:
            verdict = GreetingVerdict.WRONG_SECRET
            log.warning("a stranger came to the tensor plane: %s", error)
        except BaseException:
            connection.close()
            raise
        if verdict is GreetingVerdict.ADMITTED:
            return connection
        connection.close()
        if verdict is not GreetingVerdict.WRONG_SECRET:
            raise PlaneBroken(f"the target does not fit: {verdict.name.lower().replace('_', ' ')}")


def _judge(connection: Connection, terms: PlaneAgreement, secret: bytes) -> GreetingVerdict:
    hello = Hello.decode(connection.read(HELLO_BYTES, time.monotonic() + HELLO_SECONDS))
    verdict = _verdict(hello, terms, secret)
    admitted = verdict is GreetingVerdict.ADMITTED
    proof = _proof(secret, b"draft", terms.kind, hello) if admitted else b""
    connection.write(Welcome(verdict, proof).encode())
    return verdict


def _verdict(hello: Hello, terms: PlaneAgreement, secret: bytes) -> GreetingVerdict:
    if not hmac.compare_digest(hello.proof, _proof(secret, b"target", terms.kind, hello)):
        return GreetingVerdict.WRONG_SECRET
    ours = terms.hello()
    if hello.version != ours.version:
        return GreetingVerdict.OTHER_VERSION
    if hello.epoch != ours.epoch:
        return GreetingVerdict.OTHER_EPOCH
    same = replace(hello, proof=ours.proof) == ours
    return GreetingVerdict.ADMITTED if same else GreetingVerdict.OTHER_FORMAT


def _proof(secret: bytes, role: bytes, kind: PlaneKind, hello: Hello) -> bytes:
    said = replace(hello, proof=b"").encode()
    return hmac.digest(secret, b"|".join((role, kind.value.encode(), said)), "sha256")
