"""The processes of a service: which there are, and holding them still."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def computing(pid: int) -> list[int]:
    """The engine below a front, or the ranks below a node; parents first."""
    return [
        child for child in descendants(pid) if _name_of(child).startswith(("ssd-engine", "rank "))
    ]


def _name_of(pid: int) -> str:
    """As ps shows it."""
    return Path(f"/proc/{pid}/comm").read_text()


def state_of(pid: int) -> str:
    """One letter, as of ps."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def is_alive(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


@contextmanager
def engine_held(front: int) -> Iterator[None]:
    """The engine of a front stands still, so that nothing it computes comes to its end."""
    engine = wait_until(lambda: computing(front))[0]
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        if is_alive(engine):
            os.kill(engine, signal.SIGCONT)


def let_engine_go_on_until(front: int, reached: Callable[[], bool]) -> None:
    """A held engine computes for moments only, so that it is not long past the point."""
    engine = computing(front)[0]

    def goes_on() -> bool:
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.02)
        os.kill(engine, signal.SIGSTOP)
        return reached()

    wait_until(goes_on)
