"""Work that was not done within its first budget: one piece at a time, and the next is that of
whoever has had least of late."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

HALF_SECONDS = 30.0  # after which what somebody has had counts half
NOTHING = 0.01  # seconds that are not worth remembering


class SlowLane:
    """Use from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._at = clock()
        self._had: dict[str, float] = {}  # seconds of late, by identity
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._taken = False

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        await self._wait(name)
        begin = self._now()
        try:
            yield
        finally:
            self._charge(name, self._now() - begin)
            self._pass_on()

    async def _wait(self, name: str) -> None:
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just come
                self._pass_on()
            elif turn in self._waiting.get(name, ()):
                self._leave(name, turn)
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            name = min(self._waiting, key=lambda each: self._had.get(each, 0.0))
            turn = self._waiting[name][0]
            self._leave(name, turn)
            if not turn.done():  # its task was cancelled, and does not know yet
                turn.set_result(None)
                return
        self._taken = False

    def _leave(self, name: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[name].remove(turn)
        if not self._waiting[name]:
            del self._waiting[name]

    def _charge(self, name: str, seconds: float) -> None:
        now = self._now()
        kept = 0.5 ** ((now - self._at) / HALF_SECONDS)
        self._at = now
        had = {each: kept * spent for each, spent in self._had.items() if kept * spent > NOTHING}
        self._had = {**had, name: had.get(name, 0.0) + seconds}
