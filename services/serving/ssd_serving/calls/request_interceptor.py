"""What a client sends is read here: a request that is missing or malformed deserves a clear status.

gRPC's own reading of a single request ends in UNKNOWN when it does not parse, and never when the
client closes its side without one; its writing of a response waits for ever for a client that does
not read. So every method is served as one with streams; on the wire that is the same.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from ssd_engine.errors import InputError, SSDError
from ssd_engine.process.silent_callers import SilentCallers
from ssd_serving.calls.health_port import caller_of
from ssd_serving.calls.refusals import host_of
from ssd_serving.rpc.messages import decode_message
from ssd_serving.rpc.status import PeerSilent, ReaderStalled, ServerFull, abort
from ssd_serving.rpc.streams import write_in_time
from ssd_serving.security.access import OPEN, service_of

REQUEST_SECONDS = 60.0  # from the beginning of a call to its request
OPEN_SECONDS = 5.0  # the same, where nobody has to say who they are
MAX_UNREAD = 64  # calls of one caller that have not sent their request
RETRY_SECONDS = 1.0
RESPONSE_SECONDS = 60.0  # for a client to take a response, where no option says it
Decode = Callable[[bytes], Any]
Behaviour = Callable[..., Any]


Caller = Callable[[grpc.aio.ServicerContext], str]


class ReadRequests(grpc.aio.ServerInterceptor):
    """The innermost interceptor: what others refuse is not read.

    A call that says nothing holds a place until its request must have come; so each caller has but
    a part of the places for that. Those who may call without saying who they are share one
    (``silent_callers.py``).
    """

    def __init__(self, caller: Caller = lambda context: "") -> None:
        self._caller = caller
        self._unread: Counter[str] = Counter()
        self._silent: SilentCallers[asyncio.Event] = SilentCallers(MAX_UNREAD)  # open calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        is_open = service_of(details.method) in OPEN
        return self._reads_requests(handler, is_open)

    def _reads_requests(
        self, handler: grpc.RpcMethodHandler, is_open: bool
    ) -> grpc.RpcMethodHandler:
        """The same method, whose requests are read and parsed by us."""
        decode = _decoder(handler.request_deserializer)
        behaviour = _behaviour(handler)
        respond = _respond_with_all if inspect.isasyncgenfunction(behaviour) else _respond_with_one

        async def serve(_: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                # Nothing here holds the request while it is served: that is up to the method.
                if handler.request_streaming:
                    answer = behaviour(_requests(context, decode), context)
                else:
                    answer = behaviour(await self._read_one(context, decode, is_open), context)
                await respond(answer, context)
            except ReaderStalled as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(
            serve, response_serializer=handler.response_serializer
        )

    async def _read_one(
        self, context: grpc.aio.ServicerContext, decode: Decode, is_open: bool
    ) -> Any:
        try:
            if is_open:
                return decode(await self._read_open(context))
            with self._place(self._caller(context)):
                return decode(await _read(context, REQUEST_SECONDS))
        except SSDError as error:
            await abort(context, error)

    async def _read_open(self, context: grpc.aio.ServicerContext) -> bytes:
        given_up, host = asyncio.Event(), host_of(caller_of(context.peer()))
        goes = self._silent.enter(host, given_up)
        if goes is not None:
            goes.set()
        reading = asyncio.ensure_future(_read(context, OPEN_SECONDS))
        waiting = asyncio.ensure_future(given_up.wait())
        try:
            await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ServerFull(f"{MAX_UNREAD} calls have not sent their request", RETRY_SECONDS)
            return reading.result()
        finally:
            reading.cancel()
            waiting.cancel()
            self._silent.leave(host, given_up)

    @contextmanager
    def _place(self, caller: str) -> Iterator[None]:
        if self._unread[caller] >= MAX_UNREAD:
            raise ServerFull(f"{MAX_UNREAD} calls have not sent their request", RETRY_SECONDS)
        self._unread[caller] += 1
        try:
            yield
        finally:
            self._unread[caller] -= 1
            if not self._unread[caller]:
                del self._unread[caller]


async def _respond_with_one(answer: Any, context: grpc.aio.ServicerContext) -> None:
    """A method that answers None has written its response by itself."""
    response = await answer
    if response is not None:
        await write_in_time(context, response, RESPONSE_SECONDS)


async def _respond_with_all(answers: Any, context: grpc.aio.ServicerContext) -> None:
    async for response in answers:
        await write_in_time(context, response, RESPONSE_SECONDS)


def _behaviour(handler: grpc.RpcMethodHandler) -> Behaviour:
    kinds = (
        handler.unary_unary,
        handler.unary_stream,
        handler.stream_unary,
        handler.stream_stream,
    )
    return next(kind for kind in kinds if kind is not None)


def _decoder(deserializer: Callable[[bytes], Any] | None) -> Decode:
    """``Message.FromString`` knows its message; what takes bytes gets bytes."""
    if deserializer is None:
        return lambda data: data
    kind = deserializer.__self__  # type: ignore[attr-defined]
    return lambda data: decode_message(kind, data)


async def _read(context: grpc.aio.ServicerContext, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            data = await context.read()
    except TimeoutError:
        raise PeerSilent(f"request: did not come within {seconds:g} s") from None
    if data is grpc.aio.EOF:
        raise InputError("request", "is missing: the call ended without a message")
    return bytes(data)


async def _requests(context: grpc.aio.ServicerContext, decode: Decode) -> AsyncIterator[Any]:
    while (data := await context.read()) is not grpc.aio.EOF:
        try:
            request = decode(data)
        except SSDError as error:
            await abort(context, error)
        yield request
