"""Who is at the door and has not proved that it is a node.

There is room for a few. One more takes the place of the oldest of the host that has most of them: a
node proves itself at once, so that only those who say nothing are old.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
QUIET_SECONDS = 10.0


class Strangers:
    """Of several threads."""

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._by_host: dict[object, list[socket.socket]] = {}  # oldest first

    def enter(self, host: object, connected: socket.socket) -> None:
        with self._lock:
            if sum(map(len, self._by_host.values())) >= self._most:
                self._send_away()
            self._by_host.setdefault(host, []).append(connected)

    def leave(self, host: object, connected: socket.socket) -> None:
        """It is none any more, or has gone."""
        with self._lock:
            self._remove(host, connected)

    def _send_away(self) -> None:
        host = max(self._by_host, key=lambda each: len(self._by_host[each]))
        oldest = self._by_host[host][0]
        self._remove(host, oldest)
        with contextlib.suppress(OSError):  # whoever reads from it notices, and closes it
            oldest.shutdown(socket.SHUT_RDWR)

    def _remove(self, host: object, connected: socket.socket) -> None:
        held = self._by_host.get(host, [])
        if connected in held:
            held.remove(connected)
        if not held:
            self._by_host.pop(host, None)


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
