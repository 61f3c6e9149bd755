"""The responses of one request, from one target after the other if need be.

A stream whose target dies goes on at another one, with the seed and the tokens that are there: who
reads it sees no difference.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.failover import RetryPolicy
from ssd_client.connection.stall import StallLooker
from ssd_client.errors import ClientError, EndpointLostError, ModelMismatchError
from ssd_client.generate.events import event_of
from ssd_client.generate.route import Route
from ssd_gateway.targets.target import Metadata, Target

log = logging.getLogger(__name__)

# Before the first token, who asks can wait as well as we can: each target is asked once.
AT_FIRST = RetryPolicy(full_tries=1, leaving_tries=1)
# A stream that has begun is worth some patience.
BEGUN = RetryPolicy(retries=12, full_tries=30, leaving_tries=60, lost_wait_s=0.1)
END_OF_CALL_S = 0.2
MetadataOf = Callable[[Target], Metadata]


class Generation:
    """One request on its way; iterate over ``responses``."""

    def __init__(
        self,
        targets: Sequence[Target],
        request: pb.GenerateRequest,
        metadata_of: MetadataOf,
        stalls: StallLooker,
        stall_timeout_s: float,
        timeout_s: float | None = None,
    ) -> None:
        at_first = replace(AT_FIRST, stall_timeout_s=stall_timeout_s)
        self._route = Route(targets, request, timeout_s, at_first)
        self._stalls = stalls
        self._metadata_of = metadata_of
        self.num_moves = 0
        self._failure: ClientError | None = None

    @property
    def target(self) -> Target:
        """The one that serves it now."""
        return self._route.endpoint

    async def responses(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Responses up to the finish; raises a ClientError. ``started`` comes again where a target
        was lost before its first token."""
        while True:
            async with aclosing(self._attempt()) as responses:
                async for response in responses:
                    yield response
            if self._failure is None:
                return
            begun = bool(self._route.progress.token_ids)
            moved = self._route.go_on(self._failure)
            self.num_moves += begun
            self._route.deadline.check_wait(moved.wait_s, self._failure)
            await asyncio.sleep(moved.wait_s if begun else 0.0)

    async def _attempt(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Responses of one target; ``_failure`` says why it did not finish."""
        route, target, self._failure = self._route, self.target, None
        generation, admitted = target.generation, False
        call = target.stub.Generate(
            _resumable(route),
            timeout=route.deadline.left_s(),
            metadata=self._metadata_of(target),
        )
        target.in_flight += 1
        watch = route.watch()
        try:
            with self._stalls.watching(watch, call.cancel):
                async for response in call:
                    watch.take(response)
                    admitted = True
                    if self._take(response):
                        yield response
                    if response.WhichOneof("event") == "finish":
                        await _let_end(call)
                        return
                    watch.wait()
            self._failure = EndpointLostError(target.address, "the stream ended before its finish")
        except asyncio.CancelledError:
            if not watch.ended():
                raise
            self._failure = watch.failure(target.address)
            if admitted:
                target.stood_still()
            log.info("a stream leaves target %s", self._failure)
        except ModelMismatchError as error:
            self._failure = error
        except grpc.RpcError as error:
            self._failure = route.failure_of(error, admitted, generation)
        finally:
            target.in_flight -= 1
            call.cancel()

    def _take(self, response: pb.GenerateResponse) -> bool:
        """Keeps what a resumption needs; returns whether the response is news."""
        progress = self._route.progress
        match response.WhichOneof("event"):
            case "tokens":
                if not progress.token_ids:
                    self._route.restart(BEGUN)
                progress.token_ids.extend(response.tokens.token_ids)
            case "started":
                begun = bool(progress.token_ids)
                event = event_of(response, self.target.address)
                if event is not None:
                    progress.take(event)
                return not begun
            case "beat":
                return False
        return True


async def _let_end(call: Any) -> None:
    """Waits for the end that follows the last response, so that the target sees no cancel."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_OF_CALL_S):
            await call.code()


def _resumable(route: Route) -> pb.GenerateRequest:
    request = route.progress.request()
    if route.progress.token_ids:  # the prompt was there before any of them
        request.return_prompt = request.logprobs.prompt = False
    return request
