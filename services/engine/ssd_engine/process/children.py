"""Signals, end and memory of child processes. No torch here."""

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # an option of Linux' prctl


@contextmanager
def terminal_signals_held_back() -> Iterator[None]:
    """Start a child in here: it is born with these signals blocked, until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """Only the front process listens to the terminal and to SIGTERM; it tells the others.

    Ignoring is inherited by the children of this process.
    """
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)


def end_with(parent: int) -> None:
    """End this process when its parent ends, however that happens: the kernel sees to it, since a
    call that holds the interpreter's lock for ever would keep a thread from noticing. It acts when
    the thread ends that has started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it has ended before


def settle_memory() -> None:
    """Keep what a process has loaded out of garbage collections: one that looked at all of it would
    take a tenth of a second, in the middle of rounds."""
    gc.collect()
    gc.freeze()
