"""What an engine notes of its rounds, for those who want to see them. No text, no tokens.

The engine gathers events during a step and hands them over with the step's output; the front keeps
the last of them. Where nobody asked for a trace, nothing is gathered.
"""

import time
from enum import IntEnum
from typing import NamedTuple

import msgspec


class TraceEventKind(IntEnum):
    """The numbers are those of the wire."""

    FORWARD = 1
    PREFILL = 2
    ROUND = 3
    WAIT = 4
    DRAFT = 5
    PUSH = 6
    LAUNCH = 7
    OUTCOME = 8


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    begin: float  # seconds of the monotonic clock
    seconds: float
    sequence: int = 0  # 0: several
    round: int = 0
    rows: int = 0
    tokens: int = 0
    accepted: int = 0
    origin: int = 0  # where a speculation came from: a Source, whose numbers are the wire's, too
    look_up: int = 0


class Trace:
    """Gathers the events of one engine."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []

    def now(self) -> float:
        return time.monotonic()

    def span(self, kind: TraceEventKind, begin: float, end: float, **about: int) -> None:
        self._events.append(TraceEvent(kind, begin, end - begin, **about))

    def moment(self, kind: TraceEventKind, **about: int) -> None:
        self._events.append(TraceEvent(kind, self.now(), 0.0, **about))

    def take(self) -> list[TraceEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events


class NoTrace(Trace):
    """Gathers nothing, where nobody asked for a trace."""

    def now(self) -> float:
        return 0.0

    def span(self, kind: TraceEventKind, begin: float, end: float, **about: int) -> None:
        pass

    def moment(self, kind: TraceEventKind, **about: int) -> None:
        pass

    def take(self) -> list[TraceEvent]:
        return []


def make_trace(enabled: bool) -> Trace:
    return Trace() if enabled else NoTrace()


class TraceExcerpt(NamedTuple):
    events: list[TraceEvent]
    next_event: int
    lost: int


class TraceRing:
    """The last events of an engine, numbered from its start."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[TraceEvent] = []  # number n at n modulo the capacity
        self._total = 0

    def add(self, events: list[TraceEvent]) -> None:
        for event in events:
            if len(self._kept) < self._capacity:
                self._kept.append(event)
            else:
                self._kept[self._total % self._capacity] = event
            self._total += 1

    def since(self, first: int, most: int) -> TraceExcerpt:
        """Up to ``most`` events from number ``first`` on."""
        oldest = self._total - len(self._kept)
        begin = min(max(first, oldest), self._total)
        end = min(begin + most, self._total)
        events = [self._kept[number % self._capacity] for number in range(begin, end)]
        return TraceExcerpt(events, end, max(0, begin - first))
