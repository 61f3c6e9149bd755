"""As stream.py, for asyncio: the same events, the same failover, over channels of grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc

from ssd.v1 import target_pb2, target_pb2_grpc
from ssd_client.connection.endpoints import CHANNEL_OPTIONS, Endpoint, Endpoints
from ssd_client.connection.failover import RetryPolicy
from ssd_client.connection.stall import StallLooker
from ssd_client.errors import ClientError, EndpointLostError, ModelMismatchError
from ssd_client.generate.events import Event, Finished, event_of
from ssd_client.generate.route import Metadata, Route

_END_OF_CALL_S = 0.2


class AsyncChannels:
    """One channel for each endpoint: made when it is first asked for, and anew when the endpoint
    has made its own anew."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}
        self._left: list[grpc.aio.Channel] = []  # calls may still run over them
        self.stalls = StallLooker()

    def target_of(self, endpoint: Endpoint) -> target_pb2_grpc.TargetServiceStub:
        generation, channel = self._channels.get(endpoint.address, (-1, None))
        if channel is None or generation != endpoint.generation:
            if channel is not None:
                self._left.append(channel)
            # A pool of its own: a channel that is made anew gets a connection of its own, too.
            options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            channel = endpoint.security.async_channel(
                endpoint.address, options, endpoint.server_name
            )
            self._channels[endpoint.address] = endpoint.generation, channel
        return target_pb2_grpc.TargetServiceStub(channel)

    async def close(self) -> None:
        for channel in (*self._left, *(each for _, each in self._channels.values())):
            await channel.close()


async def generate(
    endpoints: Endpoints,
    channels: AsyncChannels,
    request: target_pb2.GenerateRequest,
    *,
    timeout_s: float | None = None,
    policy: RetryPolicy | None = None,
    metadata: Metadata = (),
) -> AsyncGenerator[Event, None]:
    """Yields the events of `request` up to its `Finished`, or raises a ClientError.

    Closing the generator, or cancelling the task that reads it, cancels the call.
    """
    route = Route(endpoints, request, timeout_s, policy)
    while True:
        attempt = _Attempt(route, channels, metadata)
        async with contextlib.aclosing(attempt.events()) as events:
            async for event in events:
                yield event
        if attempt.failure is None:
            return
        # Names may have to be looked up, which waits.
        moved = await asyncio.to_thread(route.go_on, attempt.failure)
        yield moved
        route.deadline.check_wait(moved.wait_s, attempt.failure)
        await asyncio.sleep(moved.wait_s)


class _Attempt:
    """Serves the request from one endpoint; `failure` says why that failed, None if it did not."""

    def __init__(self, route: Route, channels: AsyncChannels, metadata: Metadata) -> None:
        self._route, self._channels, self._metadata = route, channels, metadata
        self.failure: ClientError | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        route, endpoint = self._route, self._route.endpoint
        generation, admitted = endpoint.generation, False
        call = self._channels.target_of(endpoint).Generate(
            route.progress.request(),
            timeout=route.deadline.left_s(),
            metadata=(*self._metadata, *endpoint.security.metadata(endpoint.address)),
        )
        watch = route.watch()
        try:
            with self._channels.stalls.watching(watch, call.cancel):
                async for response in call:
                    watch.take(response)
                    event = event_of(response, endpoint.address)
                    if event is not None:
                        admitted = True
                        route.progress.take(event)
                        yield event
                    if isinstance(event, Finished):
                        await self._let_end(call)
                        return
                    watch.wait()
            self.failure = EndpointLostError(endpoint.address, "the stream ended before its finish")
        except asyncio.CancelledError:
            if not watch.ended():
                raise
            self.failure = watch.failure(endpoint.address)
        except ModelMismatchError as error:
            self.failure = error
        except grpc.RpcError as error:
            self.failure = route.failure_of(error, admitted, generation)
        finally:
            call.cancel()

    async def _let_end(self, call: grpc.aio.UnaryStreamCall) -> None:
        """Waits for the end that follows the last response, so that the server sees no cancel."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call.code(), _END_OF_CALL_S)
