"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Given = ParamSpec("Given")


def on_event_loop(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Each runs on an event loop of its own."""

    @functools.wraps(test)
    def run(*given: Given.args, **named: Given.kwargs) -> None:
        asyncio.run(test(*given, **named))

    return run
