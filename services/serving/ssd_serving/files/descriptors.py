"""Files that can be opened when no descriptor is free any more.

Whoever opens many connections may take all descriptors that a process has. What an operator changes
meanwhile must be read all the same: so a few are kept, and given up for the time of such a read.
"""

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import TypeVar

KEPT = 8  # a read takes one or two; others, who wait for one, may be quicker
EXHAUSTED = (errno.EMFILE, errno.ENFILE)

Value = TypeVar("Value")


class DescriptorReserve:
    """The descriptors that one process keeps; its threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a read may consist of others
        self._kept: list[int] = []
        self._fill()

    def read(self, work: Callable[[], Value]) -> Value:
        """What ``work`` gives, which opens files. Where no descriptor is left for it, the reserve
        is given up while it tries once more."""
        try:
            return work()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        with self._lock:
            while self._kept:
                os.close(self._kept.pop())
            try:
                return work()
            finally:
                self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # as many as there are
            while len(self._kept) < KEPT:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


MOST = 65_536  # descriptors: more than that many connections nobody serves
_reserve: DescriptorReserve | None = None


def keep_reserve() -> None:
    """Keeps one from now on, for the whole process, which may have as many descriptors as the
    system allows: shells leave a process 1,024 for the sake of old programs."""
    global _reserve
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _reserve = _reserve or DescriptorReserve()


def read_surely(work: Callable[[], Value]) -> Value:
    """Reads with the reserve of this process, if it keeps one."""
    return work() if _reserve is None else _reserve.read(work)
