"""As api.py, for programs that run on asyncio."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import grpc

from ssd.v1 import target_pb2
from ssd_client.connection.closing import AsyncClosing
from ssd_client.connection.endpoints import DEFAULT_ADDRESS, Endpoints
from ssd_client.connection.failover import DEFAULT_STALL_S, RetryPolicy
from ssd_client.connection.security import PLAIN, Security
from ssd_client.errors import failure_of
from ssd_client.generate import stream_async
from ssd_client.generate.api import INFO_TIMEOUT_S
from ssd_client.generate.events import Event, Tokens
from ssd_client.generate.request import Asked, Messages, build_request, chat_of, prompt_of
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream_async import AsyncChannels

if TYPE_CHECKING:
    from typing import Unpack


class AsyncStream(AsyncClosing):
    """The events of one generation, as they come. `result` is what they came to so far.

    Leaving the `async with` block, or cancelling the task, ends the generation.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self.result = GenerationResult(Timing(sent=time.monotonic()))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise
        except BaseException:
            self.result.end(time.monotonic())
            raise
        self.result.add(event, time.monotonic())
        return event

    async def text(self) -> AsyncIterator[str]:
        """The text alone, piece by piece."""
        async for event in self:
            if isinstance(event, Tokens) and event.text:
                yield event.text

    async def close(self) -> None:
        await self._events.aclose()


class AsyncClient(AsyncClosing):
    """Does what `Client` does, for asyncio: its generations run side by side in one thread."""

    def __init__(
        self,
        *targets: str,
        security: Security = PLAIN,
        timeout: float | None = None,
        retries: int | None = None,
        stall_timeout: float = DEFAULT_STALL_S,
    ) -> None:
        self._endpoints = Endpoints(targets or (DEFAULT_ADDRESS,), security)
        self._channels = AsyncChannels()
        self._timeout = timeout
        self._policy = RetryPolicy(retries=retries, stall_timeout_s=stall_timeout)

    def stream(self, prompt: Asked, **options: Unpack[RequestOptions]) -> AsyncStream:
        """The continuation of a text, or of token ids, as it comes."""
        events = stream_async.generate(
            self._endpoints,
            self._channels,
            build_request(prompt_of(prompt), options),
            timeout_s=self._timeout,
            policy=self._policy,
        )
        return AsyncStream(events)

    def stream_chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> AsyncStream:
        """The reply of a chat model, as it comes."""
        return self.stream(chat_of(messages), **options)

    async def generate(self, prompt: Asked, **options: Unpack[RequestOptions]) -> GenerationResult:
        """The whole continuation."""
        async with self.stream(prompt, **options) as events:
            async for _ in events:
                pass
        return events.result

    async def chat(self, messages: Messages, **options: Unpack[RequestOptions]) -> GenerationResult:
        """The whole reply."""
        return await self.generate(chat_of(messages), **options)

    async def model_info(self) -> target_pb2.GetModelInfoResponse:
        """What the first target serves, and within which bounds."""
        endpoint = self._endpoints[0]
        target = self._channels.target_of(endpoint)
        shown = endpoint.security.metadata(endpoint.address)
        try:
            return await target.GetModelInfo(
                target_pb2.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S, metadata=shown
            )
        except grpc.RpcError as error:
            raise failure_of(error, endpoint.address, admitted=False) from error

    async def close(self) -> None:
        await self._channels.close()
        self._endpoints.close()
