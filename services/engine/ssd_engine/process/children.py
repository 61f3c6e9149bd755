"""Signals, end and memory of child processes. No torch here."""

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker

from ssd_engine.process.log import end_process

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # an option of Linux' prctl


@contextmanager
def terminal_signals_blocked() -> Iterator[None]:
    """Start a child of multiprocessing in here: it is born with these signals blocked, until it
    ignores them."""
    resource_tracker.ensure_running()  # it starts with the first child, and unblocks signals then
    with terminal_signals_held_back():
        yield


@contextmanager
def terminal_signals_held_back() -> Iterator[None]:
    """The same for any other child."""
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


def exit_with_parent() -> None:
    """End this process when the one that started it ends, however that happens.

    A call that holds the interpreter's lock for ever would keep a thread from noticing it; so the
    kernel is asked as well. It acts when the thread ends that has started this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:
        end_process(0)  # it has ended before

    def watch() -> None:
        connection.wait([sentinel])
        end_process(0)

    threading.Thread(target=watch, daemon=True).start()


def terminate_parent() -> None:
    """Send SIGTERM to the process that has started this one. Where it has ended, somebody else is
    the parent by now, such as process 1 of a container."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == parent.pid:
        os.kill(parent.pid, signal.SIGTERM)


def settle_memory() -> None:
    """Keep what a process has loaded out of garbage collections: one that looked at all of it would
    take a tenth of a second, in the middle of rounds."""
    gc.collect()
    gc.freeze()
