"""The connection between the leader and one other node: frames of a kind and some bytes.

Every read and write has a deadline. One thread reads; any thread may write.
"""

import contextlib
import enum
import ipaddress
import select
import socket
import struct
import threading
import time

from ssd_engine.errors import SSDError
from ssd_engine.process.secret_handshake import SecretHandshake

HANDSHAKE = SecretHandshake(b"SSDNODES", 2, host="leader", guest="node")
HEADER = struct.Struct("<BI")  # kind, bytes that follow
SMALL_FRAME = 1 << 20  # bytes of a frame that is no step
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 10, 5, 3
READ_BYTES = 1 << 16
MAX_REASON = 2000
PARTING_SECONDS = 2.0
READY = b"ready"  # what a rank says on its pipe, once, when it has its weights


class NodeConnectionBroken(SSDError):
    """The other side is gone, silent, or says what makes no sense."""


class NodeFrameKind(enum.IntEnum):
    APPLY = 1  # node: its number and software
    SETUP = 2  # leader: what the node is to run
    FIT = 3  # node: it has what the set-up asks for
    ADMITTED = 4  # leader
    REFUSED = 5  # leader: why
    START = 6  # leader: all nodes are there
    STEP = 7  # leader: little-endian int32
    STORE = 8  # node: a rank's request; leader: the answer
    PING = 9  # both
    LEAVING = 10  # node: it was told to stop
    FAILED = 11  # both: why the whole cluster ends
    GOODBYE = 12  # leader: the cluster ends on purpose


Frame = tuple[NodeFrameKind, bytes]
_KINDS = frozenset(NodeFrameKind)


class NodeConnection:
    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        self._socket = connected
        self._writing = threading.Lock()
        self._buffer = bytearray()
        self.max_frame = SMALL_FRAME
        self.local_host = _plain_host(connected.getsockname()[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def write(self, data: bytes, deadline: float) -> None:
        """Whole or Broken: after half a frame nothing else makes sense."""
        with self._writing:
            left = memoryview(data)
            while len(left):
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                except OSError as error:
                    raise NodeConnectionBroken(
                        f"the connection is lost: {error.strerror}"
                    ) from None

    def send(self, kind: NodeFrameKind, payload: bytes = b"", seconds: float = 10.0) -> None:
        self.write(HEADER.pack(kind, len(payload)) + payload, time.monotonic() + seconds)

    def read(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            self._wait(select.POLLIN, deadline)
            self._receive()
        return self._take(size)

    def receive(self, deadline: float) -> Frame:
        while (frame := self._next_frame()) is None:
            self._wait(select.POLLIN, deadline)
            self._receive()
        return frame

    def pending(self) -> list[Frame]:
        """Frames that have come already, for who knows that there is something to read."""
        self._receive()
        return list(iter(self._next_frame, None))

    def expect(self, kind: NodeFrameKind, deadline: float) -> bytes:
        found, payload = self.receive(deadline)
        if found is NodeFrameKind.FAILED:
            raise NodeConnectionBroken(as_reason(payload))
        if found is not kind:
            raise NodeConnectionBroken(f"{kind.name} was expected, {found.name} came")
        return payload

    def ping(self) -> None:
        """Where the other side reads, and nobody else is writing; else there is no need to."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            if self._ready(select.POLLOUT, 0.0):
                self._socket.send(HEADER.pack(NodeFrameKind.PING, 0))
        except OSError:
            return  # whoever reads notices
        finally:
            self._writing.release()

    def last_word(self, kind: NodeFrameKind, payload: bytes = b"") -> None:
        """Nothing is sent after it. It is heard when the other side has closed, not before: a
        socket that is closed with something unread takes back what it has sent."""
        try:
            self.send(kind, payload, PARTING_SECONDS)
            self._socket.shutdown(socket.SHUT_WR)
        except (NodeConnectionBroken, OSError):
            return  # the other side is gone first

    def part(self, kind: NodeFrameKind, payload: bytes = b"") -> None:
        """Say a last word and wait, as the thread that reads, until it is heard."""
        self.last_word(kind, payload)
        deadline = time.monotonic() + PARTING_SECONDS
        with contextlib.suppress(NodeConnectionBroken, OSError):
            while True:
                self._buffer.clear()
                self._wait(select.POLLIN, deadline)
                self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise NodeConnectionBroken(f"the connection is lost: {error.strerror}") from None
        if not data:
            raise NodeConnectionBroken("the connection was closed")
        self._buffer += data

    def _next_frame(self) -> Frame | None:
        if len(self._buffer) < HEADER.size:
            return None
        number, size = HEADER.unpack_from(self._buffer)
        if number not in _KINDS or size > self.max_frame:
            raise NodeConnectionBroken(f"a frame of kind {number} and {size} bytes makes no sense")
        if len(self._buffer) < HEADER.size + size:
            return None
        self._take(HEADER.size)
        return NodeFrameKind(number), self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _wait(self, events: int, deadline: float) -> None:
        if not self._ready(events, max(0.0, deadline - time.monotonic())):
            raise NodeConnectionBroken("nothing was heard in time")

    def _ready(self, events: int, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._socket.fileno(), events)
        return bool(poller.poll(seconds * 1000))


def _plain_host(host: str) -> str:
    """An IPv4 address as such, also where a socket for both kinds writes it as one of IPv6."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def as_reason(payload: bytes) -> str:
    """The other side's words, fit for a log."""
    text = payload[:MAX_REASON].decode(errors="replace")
    return "".join(each if each.isprintable() else " " for each in text)
