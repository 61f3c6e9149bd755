"""What a confined process does: it limits itself, then answers questions until nobody asks."""

import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

from ssd_engine.process.children import ignore_terminal_signals

MAX_ANSWER_BYTES = 16 << 20
MAX_REASON = 4096  # characters
EXIT_MEMORY = 3  # exit code of a process that wanted more than it may have
STANDARD_INPUT = 0


class AnswerKind(Enum):
    """The first byte of an answer; a text follows."""

    DONE = b"+"
    REFUSED = b"-"
    BROKEN = b"!"
    UNFINISHED = b"~"


class BrokenError(Exception):
    """Raised by whoever answers: no question of this kind could be answered."""


class UnfinishedError(BaseException):
    """Raised where the question's own budget is over; nothing in between shall catch it."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises UnfinishedError after so much of this process's time; None: there is no such bound.
    What holds the interpreter for longer, as a function of its own may, is not interrupted."""
    if seconds is None:
        yield
        return
    going = True

    def stop(*_: object) -> None:
        if going:
            raise UnfinishedError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        going = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer_questions(answer: Callable[[Any], str]) -> None:
    """The command line names the limits: bytes of address space, and seconds of processor time for
    each question. Beyond either the process ends. The third number is how nice it is to others."""
    ignore_terminal_signals()  # its pipe closes when it is to end
    memory, seconds, nice = map(int, sys.argv[1:])
    os.nice(nice)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    pipe = Connection(STANDARD_INPUT)
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
        pipe.send_bytes(_answer(answer, question))


def _answer(answer: Callable[[Any], str], question: Any) -> bytes:
    try:
        data = answer(question).encode("utf-8", "surrogatepass")
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except UnfinishedError:
        return AnswerKind.UNFINISHED.value
    except BaseException as error:  # panics of a Rust library are no Exceptions
        kind = AnswerKind.BROKEN if isinstance(error, BrokenError) else AnswerKind.REFUSED
        reason = str(error)[:MAX_REASON] or type(error).__name__
        return kind.value + reason.encode("utf-8", "surrogatepass")
    if len(data) >= MAX_ANSWER_BYTES:
        return (
            AnswerKind.REFUSED.value + f"it makes more than {MAX_ANSWER_BYTES >> 20} MiB".encode()
        )
    return AnswerKind.DONE.value + data


def _limit(what: int, most: int) -> None:
    """The hard limit stays: a later question may move its own up again."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
