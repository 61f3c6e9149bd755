"""HTTP/1.1 connections with bounds: the size of headers, and the time that a request may take to
come. uvicorn has neither."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttpProtocol(HttpToolsProtocol):
    """Counts what has come since the last whole request, until its headers are complete."""

    max_header_bytes = 32 << 10
    max_connections = 4096
    read_timeout = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            if self._deadline is None:
                self._expect_headers()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._in_headers, self._header_bytes = False, 0
        self._stop_waiting()
        if size > self.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large")
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self.read_timeout, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._header_bytes:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()


def bounded(max_header_bytes: int, max_connections: int, read_timeout: float) -> type[Any]:
    """The protocol with these bounds, as uvicorn wants it: a class."""
    bounds = {
        "max_header_bytes": max_header_bytes,
        "max_connections": max_connections,
        "read_timeout": read_timeout,
    }
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), bounds)
