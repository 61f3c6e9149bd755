"""Work on a thread of its own that nothing waits for at the end of the process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def in_daemon_thread(work: Callable[[], Value], name: str) -> "asyncio.Future[Value]":
    """Runs ``work`` for an event loop. A pool's threads would hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _settle(future: "asyncio.Future[Any]", result: Any, failure: Exception | None) -> None:
    if future.cancelled():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
