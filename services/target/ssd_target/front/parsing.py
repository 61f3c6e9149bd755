"""Reads requests: small texts at once, other texts and chats on a few threads, one at a time for
each identity.

A chat has a first budget there. One that its template does not render within it goes to the back,
to a thread and a process of its own: it holds up neither others nor its identity.

A tokenizer cannot be stopped. So a request whose client is gone before its turn costs nothing; one
whose text is being read keeps its place, and that of its identity, until it has been. What waits
for its turn is in memory: the bytes of an identity have a bound, and those of all.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from ssd.v1 import target_pb2 as pb
from ssd_engine.text.confined.renderers import TakesLong
from ssd_engine.text.tokenizer import RENDERERS, Tokenizer
from ssd_serving.heap import GIVE_BACK_SECONDS, LONG_BYTES, give_back
from ssd_serving.rpc.messages import Kind, decode_message
from ssd_serving.rpc.status import ServerFull
from ssd_serving.security.allowances import IdentityAccount
from ssd_serving.security.slow_lane import SlowLane
from ssd_target.front.requests import ParsedRequest, RequestLimits, parse_request

INLINE_BYTES = 16_384  # requests above this are read on a thread, away from the event loop
THREADS = 2
MAX_HELD = 128 << 20  # bytes that wait, or are read
MAX_HELD_OF_ONE = 32 << 20  # those of one identity
RETRY_SECONDS = 1.0
Result = TypeVar("Result")


class Parser:
    """Reads the requests of all identities. Use from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "parsing")
        self._threads = asyncio.Semaphore(THREADS)
        self._slow_pool = ThreadPoolExecutor(1, "parsing-slowly")
        self._slow_lane = SlowLane()
        self._gives_back = False  # memory, soon
        self._held: Counter[str] = Counter()  # bytes, by identity

    async def parse(
        self,
        data: bytes,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        account: IdentityAccount,
        holder: str,
    ) -> ParsedRequest:
        """``holder``: whose share of the slow lane it takes."""
        most = account.allowance.prompt_tokens

        def work(message: pb.GenerateRequest) -> ParsedRequest:
            return parse_request(message, tokenizer, limits, most)

        return await self.read(pb.GenerateRequest, data, work, account, holder)

    async def read(
        self,
        kind: type[Kind],
        data: bytes,
        work: Callable[[Kind], Result],
        account: IdentityAccount,
        holder: str,
    ) -> Result:
        """``work`` on a message of this kind."""
        if len(data) <= INLINE_BYTES:
            message = decode_message(kind, data)
            if not _takes_long(message):
                return work(message)
        reading = _Reading()
        task = asyncio.ensure_future(
            self._in_turn(
                account, holder, len(data), lambda: work(decode_message(kind, data)), reading
            )
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            reading.given_up = True
            if not reading.begun:
                task.cancel()
            task.add_done_callback(_forget)
            raise

    async def _in_turn(
        self,
        account: IdentityAccount,
        holder: str,
        size: int,
        work: Callable[[], Result],
        reading: "_Reading",
    ) -> Result:
        account.running += 1
        try:
            with self._holding(account.identity.name, size):
                try:
                    async with account.turn, self._threads:
                        reading.begun = True
                        return await _on_thread(self._pool, lambda: _quickly(work))
                except TakesLong:
                    reading.wait_again()
                async with self._slow_lane.turn(holder):
                    reading.begun = True
                    return await _on_thread(self._slow_pool, lambda: _patiently(work))
        finally:
            account.running -= 1
            if size >= LONG_BYTES and not self._gives_back:
                self._gives_back = True
                asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back)

    def _give_back(self) -> None:
        """Gives memory back on a thread, as it takes some milliseconds."""
        self._gives_back = False
        with suppress(RuntimeError):  # it is shut down
            self._pool.submit(give_back)

    @contextmanager
    def _holding(self, name: str, size: int) -> Iterator[None]:
        """One text may be longer than the bound: so does nobody wait for ever."""
        for held, most in ((self._held[name], MAX_HELD_OF_ONE), (self._held.total(), MAX_HELD)):
            if held and held + size > most:
                raise ServerFull(
                    f"{held} bytes of texts wait to be read, at most {most} may", RETRY_SECONDS
                )
        self._held[name] += size
        try:
            yield
        finally:
            self._held[name] -= size
            if not self._held[name]:
                del self._held[name]


@dataclass
class _Reading:
    begun: bool = False  # a thread is at it
    given_up: bool = False  # nobody waits for it

    def wait_again(self) -> None:
        """It has to wait for another turn: if anybody does, that is."""
        self.begun = False
        if self.given_up:
            raise asyncio.CancelledError


async def _on_thread(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _quickly(work: Callable[[], Result]) -> Result:
    with RENDERERS.first_budget():
        return work()


def _patiently(work: Callable[[], Result]) -> Result:
    with RENDERERS.patiently():
        return work()


def _takes_long(message: Message) -> bool:
    """Chats are rendered by another process, and grammars are compiled."""
    return any(field.name in ("chat", "grammar") for field, _ in message.ListFields())


def _forget(task: "asyncio.Task[Any]") -> None:
    """Nobody waits for it any more, nor for what was wrong with it."""
    with suppress(asyncio.CancelledError):
        task.exception()
