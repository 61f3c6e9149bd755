"""Rows that nobody has asked for: they are kept until they are taken, and bounded in bytes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ssd_engine.tensor_plane.inbox import RowsInbox
from ssd_engine.tensor_plane.plane import await_target, go_to_draft
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.records import Announcement
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.report import report_of
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports.carriers import Meeting
from ssd_engine.tensor_plane.transports.connection import Wake
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms, enter
from ssd_engine.tensor_plane.transports.shared_memory import SharedMemoryOut
from ssd_engine.tensor_plane.transports.staging import HostStaging
from tests.engine.tensor_plane.peer import CPU, FEATURES, LOOPBACK, NO_LIMIT, make_rows, wait_up
from tests.engine.tensor_plane.planes import every_kind, far_off, hardened_kind, place_of
from tests.waiting import HANG_SECONDS, wait_until

ROW_BYTES = FEATURES.row_bytes


@contextmanager
def joined(
    kind: PlaneKind, max_bytes: int = 1 << 20, **sending: int
) -> Iterator[tuple[Sender, RowsInbox, threading.Event]]:
    """A target's sender and a draft's inbox; the event is set when rows have come."""
    came = threading.Event()
    plane, answer = await_target(
        kind, 1, FEATURES, bind_host=LOOPBACK, device=CPU, connect_timeout_s=NO_LIMIT
    )
    inbox = RowsInbox(plane, max_bytes, came.set)
    target = go_to_draft(answer, 1, FEATURES, device=CPU, connect_timeout_s=NO_LIMIT)
    sender = Sender(target, **sending)
    try:
        wait_up(sender, inbox)
        yield sender, inbox, came
    finally:
        for end in (sender, inbox):
            end.close()
            assert end.join(HANG_SECONDS)


@every_kind
def test_rows_come_unasked_in_their_order(kind: PlaneKind) -> None:
    with joined(kind) as (sender, inbox, came):
        for i in range(30):
            assert sender.send(RowsKey(i % 3, i), make_rows(i, 1 + i % 9, FEATURES))
        wait_until(lambda: inbox.received == sum(1 + i % 9 for i in range(30)))
        assert came.is_set()
        taken = inbox.take()
        assert [key for key, _ in taken] == [RowsKey(i % 3, i) for i in range(30)]
        for i, (_, rows) in enumerate(taken):
            assert torch.equal(rows, make_rows(i, 1 + i % 9, FEATURES))
        assert not inbox.take()
        assert inbox.num_bytes == inbox.discarded == 0
        report = report_of(sender)
        wait_until(lambda: report_of(sender).rows == inbox.received)
        assert report.stream == "features"
        assert report.kind == kind.value
        assert report_of(inbox).bytes == inbox.received * ROW_BYTES


def test_of_what_nobody_takes_the_newest_is_kept() -> None:
    with joined(PlaneKind.TCP, max_bytes=5 * ROW_BYTES) as (sender, inbox, _):
        for i in range(40):
            wait_until(lambda: sender.has_room(1))
            assert sender.send(RowsKey(1, i), make_rows(i, 1, FEATURES))
        wait_until(lambda: inbox.received == 40)
        assert inbox.num_bytes == 5 * ROW_BYTES
        assert inbox.discarded == 35
        assert [key.round for key, _ in inbox.take()] == [*range(35, 40)]
        assert inbox.state is PlaneState.UP


def test_a_sender_holds_so_many_bytes_and_no_more() -> None:
    """While its thread is held in making the first rows, others wait; then the oldest go."""
    with joined(PlaneKind.TCP, max_queued_bytes=10 * ROW_BYTES) as (sender, inbox, _):
        go_on = threading.Event()

        def make() -> torch.Tensor:
            assert go_on.wait(HANG_SECONDS)
            return make_rows(0, 1, FEATURES)

        sender.send_made(RowsKey(1, 0), make, 1)
        wait_until(lambda: not sender.queued_bytes)
        for i in range(1, 9):
            assert sender.has_room(3) is (sender.queued_bytes <= 7 * ROW_BYTES)
            sender.send(RowsKey(1, i), make_rows(i, 3, FEATURES))
            assert sender.queued_bytes <= 10 * ROW_BYTES
        assert sender.dropped == 5
        go_on.set()
        wait_until(lambda: inbox.received == 10)
        assert [key.round for key, _ in inbox.take()] == [0, 6, 7, 8]


@hardened_kind
@pytest.mark.parametrize("num_rows", [0, 10, 2**32 - 1])
def test_an_announcement_beyond_the_terms_breaks_the_plane(kind: PlaneKind, num_rows: int) -> None:
    plane, answer = await_target(
        kind, 1, FEATURES, bind_host=LOOPBACK, device=CPU, connect_timeout_s=NO_LIMIT
    )
    inbox, wake = RowsInbox(plane), Wake()
    connection = enter(
        place_of(answer), wake, PlaneTerms(kind, 1, FEATURES), answer.secret, far_off()
    )
    if kind is PlaneKind.SHARED_MEMORY:
        SharedMemoryOut(
            Meeting(connection, wake, PlaneTerms(kind, 1, FEATURES), HostStaging(), far_off())
        )
    connection.write(Announcement(0, RowsKey(1, 1), num_rows).encode())
    wait_until(lambda: inbox.state is PlaneState.BROKEN)
    assert f"{num_rows} rows were announced" in inbox.reason
    assert inbox.num_bytes == 0
    connection.close()
    wake.close()
    assert inbox.join(HANG_SECONDS)
