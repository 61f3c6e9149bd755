"""Rows that nobody has asked for: they are kept until they are taken, and bounded in bytes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ssd_engine.tensor_plane.inbox import RowsInbox
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.report import report_of
from ssd_engine.tensor_plane.sender import Sender
from tests.engine.tensor_plane.peer import (
    FEATURES,
    make_drafts_end,
    make_rows,
    make_targets_end,
    wait_up,
)
from tests.engine.tensor_plane.planes import ended, every_kind
from tests.waiting import HANG_SECONDS, wait_until

ROW_BYTES = FEATURES.row_bytes
ALL = 1 << 40


@contextmanager
def joined(
    kind: PlaneKind, max_bytes: int = 1 << 20, **sending: int
) -> Iterator[tuple[Sender, RowsInbox, threading.Event]]:
    """A target's sender and a draft's inbox; the event is set when rows have come."""
    came = threading.Event()
    plane, answer = make_drafts_end(kind, stream=FEATURES)
    inbox = RowsInbox(plane, max_bytes, came.set)
    sender = Sender(make_targets_end(answer, stream=FEATURES), **sending)
    with ended(sender, inbox):
        wait_up(sender, inbox)
        yield sender, inbox, came


@every_kind
def test_rows_come_unasked_in_their_order(kind: PlaneKind) -> None:
    with joined(kind) as (sender, inbox, came):
        for i in range(30):
            assert sender.send(RowsKey(i % 3, i), make_rows(i, 1 + i % 9, FEATURES))
        wait_until(lambda: inbox.received == sum(1 + i % 9 for i in range(30)))
        assert came.is_set()
        taken = inbox.take(ALL)
        assert [key for key, _ in taken] == [RowsKey(i % 3, i) for i in range(30)]
        for i, (_, rows) in enumerate(taken):
            assert torch.equal(rows, make_rows(i, 1 + i % 9, FEATURES))
        assert not inbox.take(ALL)
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
        assert [key.round for key, _ in inbox.take(ALL)] == [*range(35, 40)]
        assert inbox.state is PlaneState.UP


def test_so_many_bytes_are_taken_at_a_time() -> None:
    with joined(PlaneKind.TCP) as (sender, inbox, _):
        for i in range(6):
            sender.send(RowsKey(1, i), make_rows(i, 2, FEATURES))
        wait_until(lambda: inbox.received == 12)
        assert inbox.take(0) == []
        assert [key.round for key, _ in inbox.take(3 * ROW_BYTES)] == [0, 1]
        assert [key.round for key, _ in inbox.take(1)] == [2]
        assert len(inbox) == 3
        assert inbox.num_bytes == 6 * ROW_BYTES
        assert len(inbox.take(ALL)) == 3


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
        assert [key.round for key, _ in inbox.take(ALL)] == [0, 6, 7, 8]
