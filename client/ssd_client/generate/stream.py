"""One generation as a stream of events, carried on by another endpoint when one is lost.

The tokens received so far go along in the resumed request; its server primes itself with them and
goes on releasing text where the first one stopped. So the text is simply appended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence

import grpc

from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import Endpoint
from ssd_client.connection.failover import RetryPolicy
from ssd_client.connection.responses import Responses
from ssd_client.connection.stall import StallWatch
from ssd_client.errors import (
    ClientError,
    EndpointLostError,
    EndpointStalledError,
    ModelMismatchError,
)
from ssd_client.generate.events import Event, Finished, event_of
from ssd_client.generate.route import Clock, Metadata, Route

_END_OF_CALL_S = 0.2


def generate(
    endpoints: Sequence[Endpoint],
    request: target_pb2.GenerateRequest,
    *,
    timeout_s: float | None = None,
    policy: RetryPolicy | None = None,
    metadata: Metadata = (),
    clock: Clock = time,
) -> Generator[Event, None, None]:
    """Yields the events of `request` up to its `Finished`, or raises a ClientError.

    `timeout_s` covers everything, waits and resumes included; `metadata` goes with every call.
    Closing the iterator cancels the call: wrap it in `contextlib.closing` where the loop may be
    left early.
    """
    route = Route(endpoints, request, timeout_s, policy, clock)
    while (failure := (yield from _attempt(route, metadata))) is not None:
        moved = route.go_on(failure)
        yield moved
        route.deadline.check_wait(moved.wait_s, failure)
        clock.sleep(moved.wait_s)


def _attempt(route: Route, metadata: Metadata) -> Generator[Event, None, ClientError | None]:
    """Serves the request from one endpoint; returns why that failed, None if it did not."""
    endpoint, progress = route.endpoint, route.progress
    generation = endpoint.generation
    left_s = route.deadline.left_s()
    call = endpoint.target.Generate(progress.request(), timeout=left_s, metadata=metadata)
    admitted, watch = False, route.watch()
    with contextlib.closing(Responses(call, lambda: route.check_stalled(watch))) as responses:
        try:
            for event in _events(responses, watch, endpoint.address):
                admitted = True
                progress.take(event)
                yield event
                if isinstance(event, Finished):
                    responses.let_end(_END_OF_CALL_S)
                    return None
        except (ModelMismatchError, EndpointStalledError) as error:
            return error
        except grpc.RpcError as error:
            return route.failure_of(error, admitted, generation)
    return EndpointLostError(endpoint.address, "the stream ended before its finish")


def _events(responses: Responses, watch: StallWatch, address: str) -> Iterator[Event]:
    for response in responses:
        watch.take(response)
        event = event_of(response, address)
        if event is not None:
            yield event
        watch.wait()
