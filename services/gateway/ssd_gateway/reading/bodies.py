"""Reads the bodies of requests: small ones at once, large ones elsewhere, and not too many."""

from contextlib import AsyncExitStack

from starlette.requests import Request

from ssd_gateway.config import GatewayConfig
from ssd_gateway.http.body import read_json
from ssd_gateway.reading.prepared import Asked, Prepare, Prepared, Terms
from ssd_gateway.reading.process import ReadingProcess
from ssd_gateway.reading.room import BodyRoom

LARGE_BYTES = 64 << 10  # milliseconds of JSON, at most
# The longest that JSON has for a byte of a text is \u0000: no body is refused that a target takes.
JSON_BYTES = 6
ROOM_SECONDS = 5.0  # that a large body waits until there is room for it


class BodyReader:
    def __init__(self, config: GatewayConfig) -> None:
        self._max_bytes, self._seconds = config.max_body_mib << 20, config.read_timeout
        self._room = BodyRoom(config.max_bodies_mib << 20)
        self._process = ReadingProcess()

    async def read(self, request: Request, how: Prepare[Asked], terms: Terms) -> Prepared[Asked]:
        most = self._max_bytes
        if terms.most is not None:
            most = min(most, JSON_BYTES * terms.most)
        host = request.client.host if request.client else ""
        seconds = min(ROOM_SECONDS, self._seconds / 2)
        async with AsyncExitStack() as held:

            async def make_room(size: int) -> None:
                if size > LARGE_BYTES:
                    await held.enter_async_context(self._room.held(host, size, seconds))

            body = await read_json(request, most, self._seconds, LARGE_BYTES, make_room)
            if len(body) <= LARGE_BYTES:
                return how(body, terms)
            return await self._process.prepare(how, body, terms)

    async def close(self) -> None:
        await self._process.close()
