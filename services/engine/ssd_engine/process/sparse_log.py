"""Warnings that others could fill a log with. No torch here."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
MAX_ENTRIES = 256  # kinds and hosts that are known apart


@dataclass(slots=True)
class _Entry:
    quiet_until: float = 0.0
    left_out: int = 0


class SparseLog:
    """One warning of a kind and a host in a while, with how many there were before it.

    Whoever comes from many addresses fills neither memory nor log: hosts beyond a number share one
    warning of each kind. Several threads may use it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._lock = threading.Lock()
        self._entries: dict[tuple[Hashable, str], _Entry] = {}

    def warning(
        self, kind: Hashable, text: str, host: str = "", about: Mapping[str, Any] | None = None
    ) -> None:
        """``kind``: one of a few. ``about``: fields of their own, in JSON."""
        with self._lock:
            now = self._now()
            entry = self._entry(kind, host, now)
            if now < entry.quiet_until:
                entry.left_out += 1
                return
            left_out, entry.left_out = entry.left_out, 0
            entry.quiet_until = now + QUIET_SECONDS
        more = f" ({left_out} more before it)" if left_out else ""
        log.warning("%s%s", text, more, extra=about)

    def _entry(self, kind: Hashable, host: str, now: float) -> _Entry:
        known = self._entries.get((kind, host))
        if known is not None:
            return known
        if host and len(self._entries) >= MAX_ENTRIES:
            self._forget(now)
            host = "" if len(self._entries) >= MAX_ENTRIES else host
        return self._entries.setdefault((kind, host), _Entry())

    def _forget(self, now: float) -> None:
        """Hosts that may be named again; what was left out of them is said with others."""
        over = [key for key, each in self._entries.items() if key[1] and each.quiet_until <= now]
        for kind, host in over:
            left_out = self._entries.pop((kind, host)).left_out
            if left_out:
                self._entries.setdefault((kind, ""), _Entry()).left_out += left_out
