"""How often an engine that has ended is started again."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 600.0


class Restarts:
    """Counts restarts within the last ten minutes: an engine that ends again and again ends its
    service, and whoever looks after processes decides what then."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = clock
        self._last: deque[float] = deque()

    def take(self) -> int | None:
        """The number of one more restart within the window; None if it would be one too many."""
        now = self._now()
        while self._last and now - self._last[0] > WINDOW_SECONDS:
            self._last.popleft()
        if len(self._last) >= self._most:
            return None
        self._last.append(now)
        return len(self._last)
