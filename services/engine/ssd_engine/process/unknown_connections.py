"""Connections that were accepted and have not said yet what they are for. No torch here."""

import contextlib
import socket
import threading
from collections.abc import Hashable

from ssd_engine.process.silent_callers import SilentCallers

MAX_STRANGERS = 64


class UnknownConnections:
    """Keeps such connections, up to a number. Several threads may use it."""

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._lock = threading.Lock()
        self._crowd: SilentCallers[socket.socket] = SilentCallers(most)

    def enter(self, host: Hashable, connected: socket.socket) -> None:
        with self._lock:
            goes = self._crowd.enter(host, connected)
        if goes is not None:
            with contextlib.suppress(OSError):  # whoever reads from it notices, and closes it
                # Not that of TLS, which another thread may be in the middle of.
                socket.socket.shutdown(goes, socket.SHUT_RDWR)

    def leave(self, host: Hashable, connected: socket.socket) -> None:
        """It is none any more, or has gone."""
        with self._lock:
            self._crowd.leave(host, connected)
