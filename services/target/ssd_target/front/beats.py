"""Tells streams for which the engine has nothing yet that it goes on."""

import time
from collections.abc import Callable, Iterable

from ssd_target.front.backlog import Backlog

BEAT_SECONDS = 2.0


class StreamBeats:
    """Passes the engine's signs of life on, none of its own: a frozen engine has none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()

    def heard(self, streams: Iterable[Backlog]) -> None:
        """The engine gave a sign of life: every BEAT_SECONDS, streams that got nothing learn it."""
        now = self._clock()
        if now - self._last_at < BEAT_SECONDS:
            return
        self._last_at = now
        for stream in streams:
            stream.beat()
