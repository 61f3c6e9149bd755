"""Waiting for what another thread says, without missing a Ctrl-C."""

import contextlib
import queue
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 0.2

Item = TypeVar("Item")


def take(source: "queue.SimpleQueue[Item]", look: Callable[[], None] | None = None) -> Item:
    """Gets an item. A signal that arrives just before a wait does not end it: Python sees it when
    the wait is over, so none of them is long. `look` is called after each that was in vain."""
    while True:
        with contextlib.suppress(queue.Empty):
            return source.get(timeout=_LOOK_SECONDS)
        if look is not None:
            look()
