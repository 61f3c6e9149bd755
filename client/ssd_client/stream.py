"""One generation as a stream of events, carried on by another endpoint when one is lost.

The tokens received so far go along in the resumed request; its server primes itself with them and
goes on releasing text where the first one stopped. So the text is simply appended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import grpc

from ssd.v1 import target_pb2
from ssd_client.endpoints import Endpoint, Endpoints
from ssd_client.errors import (
    ClientError,
    DeadlineError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
    ModelMismatchError,
    count,
    failure_of,
)
from ssd_client.events import Event, Finished, Moved, Started, Tokens, event_of
from ssd_client.failover import RetryPolicy, Rota
from ssd_client.request import resume_request
from ssd_client.responses import Responses

_END_OF_CALL_S = 0.2
Metadata = tuple[tuple[str, str], ...]  # keys and values


class Clock(Protocol):
    """What a request needs of the module ``time``."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


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
    deadline = _Deadline(timeout_s, clock)
    progress = _Progress(request)
    rota = Rota(len(endpoints), policy or RetryPolicy())
    index, _ = rota.best()
    while True:
        failure = yield from _attempt(endpoints[index], progress, deadline, metadata)
        if failure is None:
            return
        if isinstance(endpoints, Endpoints) and rota.hopeless(index, failure):
            endpoints.look_again()
            rota.grow(len(endpoints))
        rota.note(index, failure, len(progress.token_ids), clock.monotonic())
        origin, (index, ready_at) = index, rota.best()
        wait_s = max(0.0, ready_at - clock.monotonic())
        yield Moved(
            origin=endpoints[origin].address,
            to=endpoints[index].address,
            tokens=len(progress.token_ids),
            full=isinstance(failure, EndpointFullError),
            wait_s=wait_s,
            reason=str(failure),
            leaving=isinstance(failure, EndpointLeavingError),
        )
        deadline.sleep(wait_s, failure)


class _Progress:
    """What of a request outlives the endpoint that served it."""

    def __init__(self, request: target_pb2.GenerateRequest) -> None:
        self._request = request
        self._started: Started | None = None
        self.token_ids: list[int] = []

    def request(self) -> target_pb2.GenerateRequest:
        """What to send now: the request as it is until a token has come, then its resumption."""
        if self._started is None or not self.token_ids:
            return self._request
        return resume_request(self._request, self._started.seed, self.token_ids)

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Tokens():
                self.token_ids += event.token_ids

    def _start(self, started: Started) -> None:
        first = self._started
        if self.token_ids and first and started.model_fingerprint != first.model_fingerprint:
            raise ModelMismatchError(
                f"cannot resume: {started.endpoint} serves another model than {first.endpoint} "
                f"(fingerprint {started.model_fingerprint}, not {first.model_fingerprint})"
            )
        if not self.token_ids:
            self._started = started


def _attempt(
    endpoint: Endpoint, progress: _Progress, deadline: _Deadline, metadata: Metadata
) -> Generator[Event, None, ClientError | None]:
    """Serves the request from one endpoint; returns why that failed, None if it did not."""
    generation = endpoint.generation
    left_s = deadline.left_s()
    call = endpoint.target.Generate(progress.request(), timeout=left_s, metadata=metadata)
    admitted = False
    with contextlib.closing(Responses(call)) as responses:
        try:
            for event in _events(responses, endpoint.address):
                admitted = True
                progress.take(event)
                yield event
                if isinstance(event, Finished):
                    responses.let_end(_END_OF_CALL_S)
                    return None
        except ModelMismatchError as error:
            return error
        except grpc.RpcError as error:
            failure = failure_of(error, endpoint.address, admitted=admitted)
            if isinstance(failure, EndpointLeavingError):
                endpoint.reconnect(generation)
            return deadline.explain(failure, len(progress.token_ids))
    return EndpointLostError(endpoint.address, "the stream ended before its finish")


def _events(responses: Responses, address: str) -> Iterator[Event]:
    for response in responses:
        event = event_of(response, address)
        if event is not None:
            yield event


class _Deadline:
    """The time of a whole request, over all its attempts."""

    def __init__(self, timeout_s: float | None, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._end = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - self._clock.monotonic())

    def sleep(self, seconds: float, failure: ClientError) -> None:
        """Sleeps; raises at once where the deadline would come first."""
        left_s = self.left_s()
        if left_s is not None and seconds >= left_s:
            raise DeadlineError(f"no time left to try again ({self._text()}): {failure}")
        self._clock.sleep(seconds)

    def explain(self, failure: ClientError, tokens: int) -> ClientError:
        """A passed deadline of our own in our own words, any other failure as it is."""
        if not isinstance(failure, DeadlineError) or self._timeout_s is None:
            return failure
        return DeadlineError(f"not finished in time ({self._text()}), {count(tokens, 'token')}")

    def _text(self) -> str:
        return f"timeout {self._timeout_s:g} s"
