"""The connections of the gateway's port, and which of them makes room when there are too many."""

import resource
from collections.abc import Callable
from typing import Protocol

from ssd_engine.process.sparse_log import SparseLog

OTHERS = 128  # descriptors that are no connections of callers: targets, logs, files that are read
IDLE, FULL = "idle", "full"  # why one was dropped
REASONS = (IDLE, FULL)


class CallerConnection(Protocol):
    host: str  # of the peer

    def abort(self) -> None: ...


class Connections:
    """So many at a time. One that waits for its caller can make room; one that works does not."""

    def __init__(self, most: int, on_dropped: Callable[[str], None] = lambda reason: None) -> None:
        """``on_dropped`` gets one of REASONS."""
        self.most, self._on_dropped = most, on_dropped
        self._working: dict[str, set[CallerConnection]] = {}  # by host
        self._waiting: dict[str, dict[CallerConnection, None]] = {}  # by host, the oldest first
        self._number = 0
        self._sparse = SparseLog()

    def add(self, newcomer: CallerConnection) -> bool:
        """True: there is room, if need be by the oldest that waits of the host with most."""
        if self._number >= self.most and not self._make_room():
            self._drop(newcomer, FULL, "all are at work, and a newcomer was refused")
            return False
        self._number += 1
        self._waiting.setdefault(newcomer.host, {})[newcomer] = None
        return True

    def waits(self, connection: CallerConnection) -> None:
        """For its caller: for a request, or for the rest of one."""
        if self._forget(connection):
            self._waiting.setdefault(connection.host, {})[connection] = None

    def works(self, connection: CallerConnection) -> None:
        if self._forget(connection):
            self._working.setdefault(connection.host, set()).add(connection)

    def remove(self, connection: CallerConnection) -> None:
        self._number -= self._forget(connection)

    def _make_room(self) -> bool:
        if not self._waiting:
            return False
        host = max(self._waiting, key=self._number_of)
        oldest = next(iter(self._waiting[host]))
        self.remove(oldest)
        self._drop(oldest, IDLE, "the oldest idle one of the host with most made room")
        return True

    def _drop(self, connection: CallerConnection, reason: str, about: str) -> None:
        self._on_dropped(reason)
        text = f"{connection.host}: {self.most} connections are as many as there may be: {about}"
        self._sparse.warning(reason, text, connection.host)
        connection.abort()

    def _number_of(self, host: str) -> int:
        return len(self._waiting.get(host, ())) + len(self._working.get(host, ()))

    def _forget(self, connection: CallerConnection) -> bool:
        """True: it was known."""
        host = connection.host
        waiting, working = self._waiting.get(host, {}), self._working.get(host, set())
        known = connection in waiting or connection in working
        waiting.pop(connection, None)
        working.discard(connection)
        if not waiting:
            self._waiting.pop(host, None)
        if not working:
            self._working.pop(host, None)
        return known


def most_connections(asked: int) -> int:
    """As many as were asked for, if there are descriptors for them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return asked if soft == resource.RLIM_INFINITY else min(asked, max(16, soft - OTHERS))
