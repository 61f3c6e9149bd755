"""Traces of several services on one clock: fetched, merged, and written for a viewer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd.v1 import trace_pb2
from ssd_client.connection.endpoints import Endpoint
from ssd_client.errors import ClientError
from ssd_client.generate.speculation import origin_name

_EXCHANGES = 16  # readings of a service's clock; the quickest one counts
_AT_ONCE = 5_000  # events of one answer
_LATEST = 2**63 - 1
_TIMEOUT_S = 10.0
_NANOS = 1e9


@dataclass(frozen=True)
class TraceEvent:
    service: str  # "target" or "draft"
    address: str
    kind: str  # "forward", "prefill", "round", "wait", "draft", "push", "launch", "outcome"
    begin: float  # seconds of this process's monotonic clock
    seconds: float  # 0: a moment
    sequence: int
    round: int
    rows: int
    tokens: int
    accepted: int
    origin: str  # "cache", "just_in_time", "ngram", "sync", "grammar", "target" or ""
    look_up: str  # "hit", "late", "miss_length", "miss_token", "stale" or ""


@dataclass(frozen=True)
class ClockOffset:
    """The seconds to add to this process's clock to get a service's."""

    seconds: float
    error_s: float  # at most


class TraceReader:
    """The events of one service from now on; a ClientError where it keeps none."""

    def __init__(self, endpoint: Endpoint, history: int = 0) -> None:
        """``history``: so many of the events before now come, too, as far as they are kept."""
        self._endpoint = endpoint
        self.address = endpoint.address
        self._next = 0
        self.lost = 0
        self._next = max(0, self._ask(_LATEST).next_event - history)
        self.offset = estimate_offset(endpoint)

    def take(self) -> list[TraceEvent]:
        """The events since the last time."""
        events: list[TraceEvent] = []
        while True:
            answer = self._ask(self._next)
            self._next = answer.next_event
            self.lost += answer.lost_events
            events += [self._event(answer, each) for each in answer.events]
            if len(answer.events) < _AT_ONCE:
                return events

    def _ask(self, first: int) -> trace_pb2.GetTraceResponse:
        request = trace_pb2.GetTraceRequest(first_event=first, max_events=_AT_ONCE)
        return self._endpoint.ask(self._endpoint.trace.GetTrace, request, _TIMEOUT_S)

    def _event(self, answer: trace_pb2.GetTraceResponse, event: trace_pb2.TraceEvent) -> TraceEvent:
        return TraceEvent(
            service=answer.role,
            address=self._endpoint.address,
            kind=_name(trace_pb2.TraceEventKind, event.kind, "TRACE_EVENT_KIND_"),
            begin=event.begin_nanos / _NANOS - self.offset.seconds,
            seconds=event.duration_nanos / _NANOS,
            sequence=event.sequence,
            round=event.round,
            rows=event.rows,
            tokens=event.tokens,
            accepted=event.accepted,
            origin=origin_name(event.origin),
            look_up=_name(trace_pb2.LookUpResult, event.look_up, "LOOK_UP_RESULT_"),
        )


def estimate_offset(endpoint: Endpoint) -> ClockOffset:
    """Takes the quickest of some exchanges: its answer came between asking and hearing it."""
    found = [_exchange(endpoint) for _ in range(_EXCHANGES)]
    return min(found, key=lambda offset: offset.error_s)


def _exchange(endpoint: Endpoint) -> ClockOffset:
    begin = time.monotonic()
    answer = endpoint.ask(endpoint.trace.GetClock, trace_pb2.GetClockRequest(), _TIMEOUT_S)
    end = time.monotonic()
    return ClockOffset(answer.clock_nanos / _NANOS - (begin + end) / 2, (end - begin) / 2)


def between(events: Iterable[TraceEvent], begin: float, end: float) -> list[TraceEvent]:
    """Events that begin in this time, in order."""
    return sorted(
        (event for event in events if begin <= event.begin <= end), key=lambda event: event.begin
    )


def perfetto(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """The trace event format that Perfetto and chrome://tracing read."""
    services = list(dict.fromkeys((event.service, event.address) for event in events))
    kinds = list(dict.fromkeys(event.kind for event in events))
    zero = min((event.begin for event in events), default=0.0)
    named = [
        {"ph": "M", "name": "process_name", "pid": i + 1, "args": {"name": f"{role} {address}"}}
        for i, (role, address) in enumerate(services)
    ]
    named += [
        {"ph": "M", "name": "thread_name", "pid": i + 1, "tid": k + 1, "args": {"name": kind}}
        for i in range(len(services))
        for k, kind in enumerate(kinds)
    ]
    places = {service: i + 1 for i, service in enumerate(services)}
    content = [
        {
            **({"ph": "X", "dur": 1e6 * event.seconds} if event.seconds else {"ph": "i", "s": "t"}),
            "name": _title(event),
            "pid": places[event.service, event.address],
            "tid": kinds.index(event.kind) + 1,
            "ts": 1e6 * (event.begin - zero),
            "args": _details(event),
        }
        for event in events
    ]
    return {"traceEvents": named + content, "displayTimeUnit": "ms"}


def write_perfetto(events: Sequence[TraceEvent], path: Path) -> None:
    try:
        path.write_text(json.dumps(perfetto(events)), encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from error


def _title(event: TraceEvent) -> str:
    if event.kind == "round":
        return f"round {event.round}: {event.accepted} of {event.tokens} right"
    return event.kind


def _details(event: TraceEvent) -> dict[str, Any]:
    names = ("sequence", "round", "rows", "tokens", "accepted", "origin", "look_up")
    return {name: value for name in names if (value := getattr(event, name))}


def _name(enum: Any, number: int, prefix: str) -> str:
    """The name; empty where nothing was said, or what only a newer version knows."""
    if not number or number not in enum.values():
        return ""
    return str(enum.Name(number)).removeprefix(prefix).lower()
