"""Waiting for an event: the one way in which tests wait.

The limit only catches a hang: it is far beyond what a busy machine needs, and no test passes or
fails by how long something took.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

HANG_SECONDS = 150.0

Seen = TypeVar("Seen")


def wait_until(
    condition: Callable[[], Seen], what: object = "", seconds: float = HANG_SECONDS
) -> Seen:
    """Return the condition's first true value; the error says ``what``."""
    pauses = _pauses(what, seconds)
    while not (seen := condition()):
        time.sleep(next(pauses))
    return seen


async def wait_until_async(
    condition: Callable[[], Seen], what: object = "", seconds: float = HANG_SECONDS
) -> Seen:
    """The same on an event loop, which goes on meanwhile."""
    pauses = _pauses(what, seconds)
    while not (seen := condition()):
        await asyncio.sleep(next(pauses))
    return seen


def _pauses(what: object, seconds: float) -> Iterator[float]:
    """Short at first, for what happens at once; longer then, to leave the cores to others."""
    pause, end = 0.002, time.monotonic() + seconds
    while time.monotonic() < end:
        yield pause
        pause = min(1.3 * pause, 0.05)
    shown = what() if callable(what) else what  # such as a service's log, as it is now
    raise TimeoutError(f"did not happen within {seconds:g} s" + (f": {shown}" if shown else ""))
