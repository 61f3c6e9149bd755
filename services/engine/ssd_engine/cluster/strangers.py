"""Who is at the door and has not proved that it is a node; and what is logged of them."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable

from ssd_engine.crowd import Crowd

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
QUIET_SECONDS = 10.0


class Strangers:
    """Several threads may use it."""

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._lock = threading.Lock()
        self._crowd: Crowd[socket.socket] = Crowd(most)

    def enter(self, host: Hashable, connected: socket.socket) -> None:
        with self._lock:
            goes = self._crowd.enter(host, connected)
        if goes is not None:
            with contextlib.suppress(OSError):  # whoever reads from it notices, and closes it
                goes.shutdown(socket.SHUT_RDWR)

    def leave(self, host: Hashable, connected: socket.socket) -> None:
        """It is none any more, or has gone."""
        with self._lock:
            self._crowd.leave(host, connected)


class SparseLog:
    """Warnings that anybody could fill a log with: one of a kind in a while, with how many there
    were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._lock = threading.Lock()
        self._quiet_until: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, kind: str, text: str) -> None:
        """``kind``: one of a few."""
        with self._lock:
            if self._now() < self._quiet_until.get(kind, 0.0):
                self._left_out[kind] += 1
                return
            left_out = self._left_out.pop(kind, 0)
            self._quiet_until[kind] = self._now() + QUIET_SECONDS
        log.warning("%s%s", text, f" ({left_out} more before it)" if left_out else "")
