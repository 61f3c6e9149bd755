"""Which endpoint gets the request next, when, and how often. Pure: time comes in as a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ssd_client.errors import (
    BadInputError,
    ClientError,
    EndpointFailedError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
    ModelMismatchError,
)

DEFAULT_STALL_S, LEAST_STALL_S = 10.0, 6.0
_ALONE = "; a second --target or --retries would resume it"


@dataclass(frozen=True)
class RetryPolicy:
    # How often a request is sent again after an endpoint was lost, in all. None: once to every
    # further endpoint. A request that kills servers must not go round for ever.
    retries: int | None = None
    # How often each endpoint may answer that it is full.
    full_tries: int = 5
    full_wait_s: float = 1.0  # where a full endpoint gives no advice
    full_wait_max_s: float = 60.0
    # How often each endpoint may answer that it starts or stops.
    leaving_tries: int = 20
    # Before an endpoint that was lost is tried again; doubles with each of its losses.
    lost_wait_s: float = 0.5
    lost_wait_max_s: float = 8.0
    # How long an endpoint may send nothing before the request goes on at another one.
    stall_timeout_s: float = DEFAULT_STALL_S

    def __post_init__(self) -> None:
        if not self.stall_timeout_s >= LEAST_STALL_S:
            raise BadInputError(
                f"stall_timeout: {self.stall_timeout_s:g} s is too short, a target that goes on "
                f"says so every few seconds: give {LEAST_STALL_S:g} or more"
            )

    def retries_for(self, endpoints: int) -> int:
        return endpoints - 1 if self.retries is None else self.retries


class _Standing(IntEnum):
    """What is known of an endpoint; the lower the better."""

    UNTRIED = 0
    FULL = 1
    LOST = 2
    UNFIT = 3  # serves another model, or failed to serve the request


@dataclass
class _Candidate:
    index: int
    standing: _Standing = _Standing.UNTRIED
    ready_at: float = 0.0
    losses: int = 0


class RetrySchedule:
    """The endpoints of one request, by index, and what is left of its retries."""

    def __init__(
        self,
        endpoints: int,
        policy: RetryPolicy,
        is_ready: Callable[[int], bool] = lambda index: True,
    ) -> None:
        """`is_ready`: whether an endpoint, by its index, serves as far as it is known."""
        if endpoints < 1:
            raise ValueError("at least one endpoint is needed")
        self._policy, self._is_ready = policy, is_ready
        self._candidates = [_Candidate(index) for index in range(endpoints)]
        self._losses_left = policy.retries_for(endpoints)
        self._failure: EndpointFailedError | None = None  # of the endpoint that failed first
        self._tries_left = {
            EndpointFullError: policy.full_tries * endpoints - 1,
            EndpointLeavingError: policy.leaving_tries * endpoints - 1,
        }

    def grow(self, endpoints: int) -> None:
        """There are so many now: the new ones come with retries of their own."""
        for index in range(len(self._candidates), endpoints):
            self._candidates.append(_Candidate(index))
            self._losses_left += self._policy.retries is None
            self._tries_left[EndpointFullError] += self._policy.full_tries
            self._tries_left[EndpointLeavingError] += self._policy.leaving_tries

    def begin_anew(self, policy: RetryPolicy) -> RetrySchedule:
        """A schedule in which all is forgotten, but for the endpoint that failed."""
        anew = RetrySchedule(len(self._candidates), policy, self._is_ready)
        anew._failure = self._failure
        for mine, theirs in zip(self._candidates, anew._candidates, strict=True):
            if mine.standing is _Standing.UNFIT:
                theirs.standing = _Standing.UNFIT
        return anew

    def may_leave(self, index: int) -> bool:
        """True if the request may go on elsewhere, though this endpoint is not known to be lost."""
        return self._losses_left > 0 and any(
            each.standing < _Standing.UNFIT and self._is_ready(each.index)
            for each in self._candidates
            if each.index != index
        )

    def hopeless(self, index: int, failure: ClientError) -> bool:
        """Whether, after this failure, no endpoint is left that was not lost."""
        others = (each.standing for each in self._candidates if each.index != index)
        gone = isinstance(failure, EndpointLostError | EndpointLeavingError)
        return gone and all(standing >= _Standing.LOST for standing in others)

    def best(self) -> tuple[int, float]:
        """The endpoint to try next, and the moment from which it may be."""
        best = min(self._candidates, key=self._rank)
        return best.index, best.ready_at

    def _rank(self, candidate: _Candidate) -> tuple[bool, bool, bool, _Standing, float]:
        """The lower the better: of those that may do, the ones that are ready."""
        standing = candidate.standing
        unfit, gone = standing is _Standing.UNFIT, standing >= _Standing.LOST
        return unfit, gone, not self._is_ready(candidate.index), standing, candidate.ready_at

    def note(self, index: int, failure: ClientError, tokens: int, now: float) -> None:
        """Takes a failed attempt into account; raises what ends the request."""
        match failure:
            case EndpointLostError():
                self._lost(self._candidates[index], failure, tokens, now)
            case EndpointFullError():
                self._wait(self._candidates[index], _Standing.FULL, failure, now)
            case EndpointLeavingError():
                # This is no loss: it said so. Where any was lost before, who is back first?
                self._wait(self._candidates[index], _Standing.LOST, failure, now)
            case ModelMismatchError():
                self._unfit(self._candidates[index], failure)
            case EndpointFailedError() if self._failure is None and self._losses_left > 0:
                # Another one may serve it; a request that fails everywhere is tried at no third.
                self._failure = failure
                self._losses_left -= 1
                self._unfit(self._candidates[index], failure)
            case _:
                raise failure

    def _lost(
        self, candidate: _Candidate, failure: EndpointLostError, tokens: int, now: float
    ) -> None:
        if self._losses_left <= 0:
            if self._failure is not None:
                raise self._failure from failure
            hint = _ALONE if len(self._candidates) == 1 and not candidate.losses else ""
            raise EndpointLostError(failure.address, failure.reason, tokens, hint) from failure
        self._losses_left -= 1
        wait = self._policy.lost_wait_s * 2 ** min(candidate.losses, 16)
        candidate.losses += 1
        candidate.standing = _Standing.LOST
        candidate.ready_at = now + min(wait, self._policy.lost_wait_max_s)

    def _unfit(
        self, candidate: _Candidate, failure: ModelMismatchError | EndpointFailedError
    ) -> None:
        """It is not tried again; the request ends unless an endpoint is left that may fit."""
        candidate.standing = _Standing.UNFIT
        if min(each.standing for each in self._candidates) >= _Standing.LOST:
            raise self._failure or failure

    def _wait(
        self,
        candidate: _Candidate,
        standing: _Standing,
        failure: EndpointFullError | EndpointLeavingError,
        now: float,
    ) -> None:
        """It is tried again when it advises it, unless it has said so too often."""
        if self._tries_left[type(failure)] <= 0:
            raise failure
        self._tries_left[type(failure)] -= 1
        advice = failure.retry_delay_s
        wait = self._policy.full_wait_s if advice is None else advice
        candidate.standing = standing
        candidate.ready_at = now + min(wait, self._policy.full_wait_max_s)
