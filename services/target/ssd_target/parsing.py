"""Where requests are read: small texts at once, others and chats on a few threads, one for each
identity.

A tokenizer cannot be stopped. So a request whose client is gone before its turn costs nothing; one
whose text is being read keeps its place, and that of its identity, until it has been.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ssd_engine.serving.allowances import Account
from ssd_engine.tokenizer import Tokenizer
from ssd_target.requests import Limits, ParsedRequest, parse_message, parse_request

INLINE_BYTES = 16_384  # requests above this are read on a thread, away from the event loop
THREADS = 2


class Parser:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "parsing")
        self._threads = asyncio.Semaphore(THREADS)

    async def parse(
        self, data: bytes, tokenizer: Tokenizer, limits: Limits, account: Account
    ) -> ParsedRequest:
        most = account.allowance.prompt_tokens

        def work() -> ParsedRequest:
            return parse_request(parse_message(data), tokenizer, limits, most)

        if len(data) <= INLINE_BYTES:
            message = parse_message(data)
            if message.WhichOneof("prompt") != "chat":  # another process renders those
                return parse_request(message, tokenizer, limits, most)
        reading = _Reading()
        task = asyncio.ensure_future(self._in_turn(account, work, reading))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not reading.begun:
                task.cancel()
            task.add_done_callback(_forget)
            raise

    async def _in_turn(
        self, account: Account, work: Callable[[], ParsedRequest], reading: "_Reading"
    ) -> ParsedRequest:
        account.running += 1
        try:
            async with account.turn, self._threads:
                reading.begun = True
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, work)
        finally:
            account.running -= 1


@dataclass
class _Reading:
    begun: bool = False


def _forget(task: "asyncio.Task[ParsedRequest]") -> None:
    """Nobody waits for it any more, nor for what was wrong with it."""
    with suppress(asyncio.CancelledError):
        task.exception()
