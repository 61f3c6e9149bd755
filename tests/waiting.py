"""Waiting for an event: the one way in which tests wait.

The limit only catches a hang: it is far beyond what a busy machine needs, and no test passes or
fails by how long something took.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

HANG_SECONDS = 150.0
_INTERVAL_SECONDS = 0.01

Seen = TypeVar("Seen")


def wait_until(
    condition: Callable[[], Seen], what: object = "", seconds: float = HANG_SECONDS
) -> Seen:
    """Return the condition's first true value; the error says ``what``."""
    end = time.monotonic() + seconds
    while not (seen := condition()):
        if time.monotonic() > end:
            raise TimeoutError(_message(what, seconds))
        time.sleep(_INTERVAL_SECONDS)
    return seen


async def wait_until_async(
    condition: Callable[[], Seen], what: object = "", seconds: float = HANG_SECONDS
) -> Seen:
    """The same on an event loop, which goes on meanwhile."""
    end = time.monotonic() + seconds
    while not (seen := condition()):
        if time.monotonic() > end:
            raise TimeoutError(_message(what, seconds))
        await asyncio.sleep(_INTERVAL_SECONDS)
    return seen


def _message(what: object, seconds: float) -> str:
    """``what`` may be a function, such as a service's log, that is called only now."""
    shown = what() if callable(what) else what
    return f"did not happen within {seconds:g} s" + (f": {shown}" if shown else "")
