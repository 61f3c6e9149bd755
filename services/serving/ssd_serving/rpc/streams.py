"""Streams to peers that may read slowly, or not at all."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from ssd_serving.rpc.status import ReaderStalled


async def write_in_time(
    context: grpc.aio.ServicerContext, response: Any, seconds: float, flag: str = ""
) -> None:
    """A write waits for the reader's flow control; ``flag`` is the option that set its limit."""
    try:
        async with asyncio.timeout(seconds):
            await context.write(response)
    except TimeoutError:
        bound = f"{seconds:g} s ({flag})" if flag else f"{seconds:g} s"
        raise ReaderStalled(f"the client read nothing for {bound}") from None


async def exchange(failure: "asyncio.Future[Any]", *directions: Coroutine[Any, Any, None]) -> None:
    """Runs both directions of a stream until one of them ends, or the stream has a failure: an
    error, which is raised from here as one of a direction is.

    What is raised knows this frame; the frame forgets who holds the error. In a circle of them the
    call, and so its connection, would stay until somebody collects it.
    """
    tasks = [asyncio.ensure_future(each) for each in directions]
    try:
        await asyncio.wait([failure, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del failure, tasks, task
