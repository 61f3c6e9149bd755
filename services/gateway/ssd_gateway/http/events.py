"""Server-sent events to one reader, who may be slow, or gone."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encoder = msgspec.json.Encoder()


def event(content: Any) -> bytes:
    return b"data: " + _encoder.encode(content) + b"\n\n"


class ReaderGone(Exception):
    """The caller has closed the connection, or reads too slowly."""


class EventStream:
    def __init__(
        self, send: Send, write_timeout: float, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._send, self._write_timeout = send, write_timeout
        self._headers = headers
        self.begun = False

    async def write(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            headers = [*HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(data, more=True)

    async def end(self, data: bytes) -> None:
        await self._write(data, more=False)

    async def _write(self, data: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ReaderGone(f"nothing was read for {self._write_timeout:g} s") from None


async def gone(receive: Receive) -> None:
    """Returns when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
