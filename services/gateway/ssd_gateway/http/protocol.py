"""HTTP/1.1 connections with bounds, which uvicorn does not have: the size of what frames a request,
the time that it may take to come, and the time that a reader may take nothing.

An answer that is complete before its request is ends the connection: what still comes is dropped
for a while, so that the caller can read why, and is not read as a request.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ssd_gateway.http.connections import Connections
from ssd_gateway.http.errors import ApiError
from ssd_gateway.http.request_headers import valid_request_id

AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER
EXTENSION = "ssd_gateway"  # of a scope: its Incoming
LINGER_SECONDS = 2.0  # that what nobody reads is dropped before the connection ends
LINGER_BYTES = 64 << 20
# A word between that every client passes over, to find out whether there is one.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # between two of them
GRACE_SECONDS = 1.0  # in which streams of events, who say so, have been cut already


class Incoming:
    """A request on its way."""

    def __init__(self, connection: "BoundedHttpProtocol") -> None:
        self._connection = connection
        self.is_whole = False

    def abort(self) -> None:
        """Ends the connection at once, whatever is still to be written."""
        self._connection.abort()

    # As the transport of its answer, to uvicorn

    def write(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """The answer is the last one."""
        self._connection.leave(self)


def incoming(scope: Scope) -> Incoming:
    found: Incoming = scope["extensions"][EXTENSION]
    return found


class BoundedHttpProtocol(HttpToolsProtocol):
    max_header_bytes = 32 << 10
    read_timeout = 30.0
    write_timeout = 60.0
    peers = Connections(4096)
    on_refused: Callable[[ApiError], None] = staticmethod(lambda problem: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes since the last ones of a body, which frame it: lines, headers, trailers, chunks.
        self._framing_bytes = 0
        self._body_bytes = 0
        self._incoming: Incoming | None = None  # None between requests, and until its headers end
        self._deadline: asyncio.TimerHandle | None = None
        self._dropping = 0  # bytes that may still come, where nothing is read any more
        self._unread: tuple[asyncio.TimerHandle, int] | None = None  # bytes that were left then
        self._closing: asyncio.TimerHandle | None = None
        self._lost = False
        self.host = ""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.host = self.client[0] if self.client else ""
        if self.peers.add(self):
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.peers.remove(self)
        self._stop_waiting()
        if self._closing is not None:
            self._closing.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            self._dropping -= len(data)
            if self._dropping <= 0:
                self.abort()
            return
        if self._incoming is None and self._deadline is None:
            self._expect_headers()
        body = self._body_bytes
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._body_bytes > body:
            self._framing_bytes = 0
        elif self._framing_bytes > self.max_header_bytes:
            self._refuse(self._headers_too_large())

    # A request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._incoming = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming is None:  # after a body come trailers, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._framing_bytes = 0
        self._stop_waiting()
        if self.transport.is_closing():  # refused: nothing that follows is a request
            return
        if size > self.max_header_bytes:
            self._refuse(self._headers_too_large())
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            about = f"Host: one such header is needed, got {hosts}"
            self._refuse(ApiError(400, about, code="bad_http"))
            return
        self._incoming = Incoming(self)
        extensions: dict[str, Any] = {EXTENSION: self._incoming}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        self.cycle.transport = self._incoming  # type: ignore[assignment]
        if not self.pipeline:  # else one before it is being answered
            self.peers.waits(self)  # from now on: it is not idle

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._incoming is not None:
            self._incoming.is_whole = True
        self._incoming, self._framing_bytes = None, 0
        self.peers.works(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whoever sends nothing more may wait for an answer, the last one of the connection.
        True: it stays open for that."""
        cycle, is_secret = self.cycle, self.transport.get_extra_info("sslcontext") is not None
        if cycle is None or cycle.response_complete or self._incoming is not None or is_secret:
            return False
        if cycle.scope["http_version"] == "1.0":  # nothing can be sent that finds out who has gone
            return False
        cycle.keep_alive = False
        self._ask_whether_it_reads(FIRST_PAUSE)
        return True

    def _ask_whether_it_reads(self, pause: float) -> None:
        """Who has gone for good looks the same, but resets the connection once something is sent,
        which the next thing that is sent finds out. Answers that have begun do that themselves."""
        cycle = self.cycle
        if self._lost or cycle.response_started or self.pipeline:
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(pause, self._ask_whether_it_reads, min(2 * pause, LONGEST_PAUSE))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._lost:  # the last one of those that came
            self.peers.waits(self)

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self.read_timeout, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._framing_bytes:
            about = f"headers did not come within {self.read_timeout:g} s"
            self._refuse(ApiError(408, about))
        else:
            self.leave(None)

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser does not understand."""
        self._refuse(ApiError(400, "this is not valid HTTP", code="bad_http"))

    def _headers_too_large(self) -> ApiError:
        about = f"headers, trailers and the like have more than {self.max_header_bytes} bytes"
        return ApiError(431, f"{about} (--max-header-kib)", code="headers_too_large")

    def _refuse(self, problem: ApiError) -> None:
        if self.transport.is_closing():
            return
        self.on_refused(problem)
        if self._is_answering():  # it would be taken for a part of that answer
            self.abort()
            return
        self.transport.write(self._written(problem))
        self.leave(None)

    def _is_answering(self) -> bool:
        """An answer is on its way, or will be before one to what comes now."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(cycle.response_started or self._incoming is None)

    def _written(self, problem: ApiError) -> bytes:
        body = msgspec.json.encode(problem.body())
        told = next((v for name, v in self.headers or () if name == b"x-request-id"), b"")
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", valid_request_id(told.decode("latin-1")).encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[problem.status] + lines + b"\r\n" + body

    # The end

    def leave(self, answered: Incoming | None) -> None:
        """What was written is the last of this connection. ``answered``: which request by it."""
        if answered is None or answered.is_whole:
            self._close()
        elif not self._dropping:
            self._dropping = LINGER_BYTES
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._closing = self.loop.call_later(LINGER_SECONDS, self._close)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """A caller that does not read what was written has so long to do so."""
        if not self.transport.is_closing():
            self.transport.close()
            self._closing = self.loop.call_later(self.write_timeout, self.abort)

    def abort(self) -> None:
        """What was not read is dropped by the kernel, too."""
        if not self._lost:
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.transport.abort()

    # Readers that take nothing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread[0].cancel()
            self._unread = None
        super().resume_writing()

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self._unread is not None and left >= self._unread[1]:
            self.abort()
            return
        seconds = self.write_timeout + GRACE_SECONDS
        self._unread = self.loop.call_later(seconds, self._watch_reader), left


def bounded(
    max_header_bytes: int,
    peers: Connections,
    on_refused: Callable[[ApiError], None],
    read_timeout: float,
    write_timeout: float,
) -> type[Any]:
    """The protocol with these bounds, as uvicorn wants it: a class."""
    bounds = {
        "max_header_bytes": max_header_bytes,
        "peers": peers,
        "on_refused": staticmethod(on_refused),
        "read_timeout": read_timeout,
        "write_timeout": write_timeout,
    }
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), bounds)
