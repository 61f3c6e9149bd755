"""The ring of events: what is kept, what is lost, and where a reader goes on."""

import pytest

from ssd_engine.tracing.events import NoTrace, Trace, TraceEvent, TraceEventKind, TraceRing


@pytest.mark.parametrize(
    ("first", "most", "found", "next_event", "lost"),
    [
        (5, 2, [5, 6], 7, 0),
        (7, 2, [7], 8, 0),  # goes on where it stopped
        (2, 100, [5, 6, 7], 8, 3),  # a slow reader is told what it has lost
        # who asks for later events gets the number of the next one
        *((later, 100, [], 8, 0) for later in (8, 9, 2**63 - 1)),
    ],
)
def test_a_ring_has_the_newest_events_from_where_a_reader_asks(
    first: int, most: int, found: list[int], next_event: int, lost: int
) -> None:
    ring = TraceRing(3)
    for numbers in (range(6), range(6, 8)):
        ring.add([TraceEvent(TraceEventKind.ROUND, 0.0, 0.0, round=number) for number in numbers])
    events, *rest = ring.since(first, most)
    assert [event.round for event in events] == found
    assert rest == [next_event, lost]


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
