"""The ring of events: what is kept, what is lost, and where a reader goes on."""

import pytest

from ssd_engine.tracing.events import NoTrace, Trace, TraceEvent, TraceEventKind, TraceRing


def events(*numbers: int) -> list[TraceEvent]:
    return [TraceEvent(TraceEventKind.ROUND, 0.0, 0.0, round=number) for number in numbers]


def rounds(found: list[TraceEvent]) -> list[int]:
    return [event.round for event in found]


def test_a_reader_goes_on_where_it_stopped() -> None:
    ring = TraceRing(10)
    ring.add(events(0, 1, 2, 3))
    first = ring.since(0, 3)
    assert (rounds(first.events), first.next_event, first.lost) == ([0, 1, 2], 3, 0)
    ring.add(events(4))
    second = ring.since(first.next_event, 3)
    assert (rounds(second.events), second.next_event, second.lost) == ([3, 4], 5, 0)
    assert ring.since(second.next_event, 3).events == []


def test_a_slow_reader_is_told_what_it_has_lost() -> None:
    ring = TraceRing(3)
    ring.add(events(*range(8)))
    found = ring.since(2, 100)
    assert (rounds(found.events), found.next_event, found.lost) == ([5, 6, 7], 8, 3)


@pytest.mark.parametrize("first", [8, 9, 2**63 - 1])
def test_who_asks_for_later_events_gets_the_number_of_the_next_one(first: int) -> None:
    ring = TraceRing(3)
    ring.add(events(*range(8)))
    assert ring.since(first, 100) == ([], 8, 0)


def test_an_engine_hands_every_event_over_once() -> None:
    trace = Trace()
    trace.span(TraceEventKind.FORWARD, 1.0, 1.5, rows=4)
    trace.moment(TraceEventKind.PUSH, sequence=7)
    forward, push = trace.take()
    assert (forward.kind, forward.begin, forward.seconds, forward.rows) == (1, 1.0, 0.5, 4)
    assert (push.sequence, push.seconds) == (7, 0.0)
    assert trace.take() == []


def test_nothing_is_gathered_that_nobody_asked_for() -> None:
    trace = NoTrace()
    trace.span(TraceEventKind.FORWARD, 1.0, 1.5)
    trace.moment(TraceEventKind.PUSH)
    assert trace.take() == []
