"""What a request keeps while it goes from one endpoint to another: tokens, time, and its way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import grpc

from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import Endpoints
from ssd_client.connection.failover import RetryPolicy, RetrySchedule
from ssd_client.connection.stall import StallWatch
from ssd_client.errors import (
    ClientError,
    DeadlineError,
    EndpointFullError,
    EndpointLeavingError,
    ModelMismatchError,
    count,
    failure_of,
)
from ssd_client.generate.events import Event, Moved, Started, Tokens
from ssd_client.generate.request import resume_request

Metadata = tuple[tuple[str, str], ...]  # keys and values


class Clock(Protocol):
    """What a request needs of the module ``time``."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class RoutedEndpoint(Protocol):
    """What a route needs of an endpoint."""

    address: str
    generation: int  # counts its connections
    ready: bool  # as far as it is known

    @property
    def answers(self) -> bool:
        """True if it is known to answer others."""

    def reconnect(self, generation: int) -> None: ...


class RequestProgress:
    """The part of a request that outlives the endpoint that served it."""

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
        if self.token_ids and first and not started.is_like(first):
            theirs, ours = (
                f"fingerprint {each.model_fingerprint}, digest {each.model_digest or 'none'}"
                for each in (started, first)
            )
            raise ModelMismatchError(
                f"cannot resume: {started.endpoint} serves another model than {first.endpoint} "
                f"({theirs}; not {ours})"
            )
        if not self.token_ids:
            self._started = started


RoutedT = TypeVar("RoutedT", bound=RoutedEndpoint)


class Deadline:
    """The time of a whole request, over all its attempts."""

    def __init__(self, timeout_s: float | None, clock: Clock = time) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._end = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - self._clock.monotonic())

    def check_wait(self, seconds: float, failure: ClientError) -> None:
        """Raises where the deadline would come before the end of the wait."""
        left_s = self.left_s()
        if left_s is not None and seconds >= left_s:
            raise DeadlineError(f"no time left to try again ({self._text()}): {failure}")

    def explain(self, failure: ClientError, tokens: int) -> ClientError:
        """A passed deadline of our own in our own words, any other failure as it is."""
        if not isinstance(failure, DeadlineError) or self._timeout_s is None:
            return failure
        return DeadlineError(f"not finished in time ({self._text()}), {count(tokens, 'token')}")

    def _text(self) -> str:
        return f"timeout {self._timeout_s:g} s"


class Route(Generic[RoutedT]):
    """Chooses the endpoint that serves a request, and the next one when that has failed."""

    def __init__(
        self,
        endpoints: Sequence[RoutedT],
        request: target_pb2.GenerateRequest,
        timeout_s: float | None = None,
        policy: RetryPolicy | None = None,
        clock: Clock = time,
    ) -> None:
        self._endpoints, self._clock = endpoints, clock
        policy = policy or RetryPolicy()
        self._schedule = RetrySchedule(len(endpoints), policy, lambda i: endpoints[i].ready)
        self._stall_timeout_s = policy.stall_timeout_s
        self.progress, self.deadline = RequestProgress(request), Deadline(timeout_s, clock)
        self.index, _ = self._schedule.best()

    def restart(self, policy: RetryPolicy) -> None:
        """What was tried so far is forgotten: from now on, retries are those of ``policy``."""
        self._schedule = self._schedule.begin_anew(policy)

    @property
    def endpoint(self) -> RoutedT:
        return self._endpoints[self.index]

    def may_leave(self) -> bool:
        """True if another endpoint may go on with the request."""
        return self._schedule.may_leave(self.index)

    def watch(self) -> StallWatch:
        """Watches one attempt at serving the request."""
        return StallWatch(self._stall_timeout_s, self.may_leave, lambda: self.endpoint.answers)

    def check_stalled(self, watch: StallWatch) -> None:
        """Raises EndpointStalledError where the watched attempt stands still."""
        if watch.look(self._clock.monotonic()):
            raise watch.failure(self.endpoint.address)

    def failure_of(self, error: grpc.RpcError, admitted: bool, generation: int) -> ClientError:
        """``generation``: of the endpoint's connection that the call went over."""
        failure = failure_of(error, self.endpoint.address, admitted=admitted)
        if isinstance(failure, EndpointLeavingError):
            self.endpoint.reconnect(generation)
        return self.deadline.explain(failure, len(self.progress.token_ids))

    def go_on(self, failure: ClientError) -> Moved:
        """Where to, and after which wait; raises what ends the request."""
        tokens = len(self.progress.token_ids)
        if isinstance(self._endpoints, Endpoints) and self._schedule.hopeless(self.index, failure):
            self._endpoints.look_again()
            self._schedule.grow(len(self._endpoints))
        self._schedule.note(self.index, failure, tokens, self._clock.monotonic())
        origin = self.endpoint.address
        self.index, ready_at = self._schedule.best()
        return Moved(
            origin=origin,
            to=self.endpoint.address,
            tokens=tokens,
            full=isinstance(failure, EndpointFullError),
            wait_s=max(0.0, ready_at - self._clock.monotonic()),
            reason=str(failure),
            leaving=isinstance(failure, EndpointLeavingError),
        )
