"""Streams to peers that may read slowly, or not at all."""

import asyncio
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
