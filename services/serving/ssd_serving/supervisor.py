"""Tasks that last as long as their service: an error that nobody foresaw does not end them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PAUSES = (0.5, 30.0)  # first and longest, in seconds, before a task is begun again
STEADY_SECONDS = 60.0  # a task that ran for so long begins again after the first pause

Work = Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """Begins a task again that an error has ended, after a pause that grows. Each such error is
    logged with its traceback, and counted."""

    def __init__(
        self,
        on_failure: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``on_failure`` is told the name of the task."""
        self._on_failure, self._now, self._sleep = on_failure, clock, sleep

    def start(self, name: str, work: Work, about: str = "") -> "asyncio.Task[None]":
        """Runs ``work`` until it returns, or the task is cancelled. ``name``: one of a few;
        ``about`` tells it apart from others of its name, in the log."""
        return asyncio.get_running_loop().create_task(self._keep(name, work, about), name=name)

    async def _keep(self, name: str, work: Work, about: str) -> None:
        pause, longest = PAUSES
        while True:
            begun_at = self._now()
            try:
                return await work()
            except Exception:
                if self._now() - begun_at >= STEADY_SECONDS:
                    pause = PAUSES[0]
                self._on_failure(name)
                which = f"{name} {about}".rstrip()
                log.exception("task %s failed; it begins again in %g s", which, pause)
            await self._sleep(pause)
            pause = min(2 * pause, longest)
