"""Bytes of large bodies that are in memory at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ssd_gateway.http.errors import SERVER, ApiError

SMALLER_BYTES = 1 << 20  # of a body; larger ones leave it a quarter of the room


class BodyRoom:
    """Room for so many bytes. Nobody's bodies take more than half of it, but for a single one.

    Larger bodies take three quarters of the room, and of anybody's half, but for one that is alone:
    whoever announces them and sends nothing does not keep the others out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()  # by host
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def held(self, host: str, size: int, seconds: float) -> AsyncIterator[None]:
        """Holds room for a body; raises an ApiError where none becomes free in time."""
        await self._wait(host, size, seconds)
        self._held[host] += size
        try:
            yield
        finally:
            self._held[host] -= size
            self._held += Counter()  # hosts that hold nothing are forgotten
            self._freed.set()
            self._freed = asyncio.Event()

    async def _wait(self, host: str, size: int, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._has_room(host, size):
                    await self._freed.wait()
        except TimeoutError:
            raise ApiError(
                503,
                "too many large bodies are read at a time; try again (--max-bodies-mib)",
                SERVER,
                code="overloaded",
                retry_after=1,
            ) from None

    def _has_room(self, host: str, size: int) -> bool:
        own, total = self._held[host], self._held.total()
        most = self._most if size <= SMALLER_BYTES else self._most * 3 // 4
        share = not own or own + size <= most // 2
        return share and (not total or total + size <= most)
