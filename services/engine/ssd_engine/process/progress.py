"""Shows how far a start has come: a bar in a terminal, a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

log = logging.getLogger(__name__)

FIRST_SECONDS, EVERY_SECONDS = 2.0, 5.0  # until the first line, and between two
FRAME_SECONDS = 0.1
WIDTH = 24  # characters of a bar
Item = TypeVar("Item")


def tracked(
    what: str, items: Iterable[Item], total: int, unit: str, quiet: bool = False
) -> Iterator[Item]:
    """The items, one by one, and said how many there were so far. ``quiet``: of another rank."""
    if quiet or not log.isEnabledFor(logging.INFO):
        yield from items
        return
    shown = _Bar(what, total, unit) if _is_terminal() else _Lines(what, total, unit)
    try:
        for done, item in enumerate(items):
            shown.show(done)
            yield item
    finally:
        shown.end()


def _is_terminal() -> bool:
    """Lines of JSON are for machines, wherever they go."""
    handlers = logging.getLogger().handlers
    plain = all(type(each.formatter) is logging.Formatter for each in handlers)
    return sys.stderr.isatty() and plain


class _Lines:
    def __init__(self, what: str, total: int, unit: str) -> None:
        self._about = what, total, unit
        self._next = time.monotonic() + FIRST_SECONDS

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            what, total, unit = self._about
            log.info("%s: %d of %d %s", what, done, total, unit)
            self._next = now + EVERY_SECONDS

    def end(self) -> None:
        pass


class _Bar:
    """A bar on one line, which is gone at the end."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._next = 0.0

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + FRAME_SECONDS
        full = WIDTH * done // max(1, self._total)
        bar = "█" * full + "░" * (WIDTH - full)
        sys.stderr.write(f"\r{self._what} {bar} {done} of {self._total} {self._unit}\033[K")
        sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
