"""A peer that lies breaks the plane: never the process, and never the memory of the other."""

import fcntl
import os
import tempfile
from collections.abc import Callable

import pytest

from ssd_engine.tensor_plane import receiver as receiver_module
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.records import (
    ANNOUNCEMENT_BYTES,
    WINDOW,
    Announcement,
    encode_serial,
)
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.transports.connection import Connection
from tests.engine.tensor_plane.gloo import GLOO
from tests.engine.tensor_plane.peer import DISTRIBUTIONS, wait_up
from tests.engine.tensor_plane.planes import (
    HARDENED,
    Clock,
    admitted_by_a_test,
    dialled_by_a_test,
    expect_break,
)
from tests.waiting import HANG_SECONDS, wait_until


def segment(size: int = WINDOW * DISTRIBUTIONS.max_bytes, seals: int | None = None) -> int:
    file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals is None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def start_lying(kind: PlaneKind, connection: Connection) -> None:
    if kind is PlaneKind.SHARED_MEMORY:
        file = segment()
        connection.send_file(file)
        os.close(file)


def announcement(serial: int = 0, num_rows: int = 1, round_: int = 1) -> bytes:
    return Announcement(serial, RowsKey(1, round_), num_rows).encode()


@pytest.mark.parametrize("kind", HARDENED)
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"X" * ANNOUNCEMENT_BYTES, "malformed"),
        (announcement(num_rows=0), "0 rows"),
        (announcement(num_rows=7), "7 rows"),
        (announcement(num_rows=2**32 - 1), "4294967295 rows"),
        (announcement(serial=1), "announced as 1"),
        (announcement(serial=2**64 - 1), "announced as"),
    ],
)
def test_a_corrupted_header_breaks_the_plane(kind: PlaneKind, said: bytes, reason: str) -> None:
    with admitted_by_a_test(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_up(receiver)
        connection.write(said)
        expect_break(receiver, reason)


@pytest.mark.parametrize("kind", HARDENED)
def test_half_a_header_is_a_broken_plane_and_no_hang(kind: PlaneKind, clock: Clock) -> None:
    with admitted_by_a_test(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_up(receiver)
        connection.write(announcement()[:10])
        clock.pass_until_broken(receiver)
        expect_break(receiver, "too long")


def test_rows_that_are_announced_and_do_not_come_break_the_plane(clock: Clock) -> None:
    with admitted_by_a_test(PlaneKind.TCP) as (receiver, connection):
        wait_up(receiver)
        receiver.expect(RowsKey(1, 1), 6)
        connection.write(announcement(num_rows=6) + b"\0" * 100)
        assert receiver.receive(RowsKey(1, 1), 6, 0.05) is None
        assert receiver.state is PlaneState.UP  # only the plane's thread waits for the rest
        clock.pass_until_broken(receiver)
        expect_break(receiver, "too long")


def test_more_bytes_than_announced_break_the_plane_not_the_process() -> None:
    with admitted_by_a_test(PlaneKind.TCP) as (receiver, connection):
        wait_up(receiver)
        receiver.expect(RowsKey(1, 1), 1)
        connection.write(announcement() + b"\0" * (DISTRIBUTIONS.row_bytes + 64))
        expect_break(receiver, "malformed")


@pytest.mark.parametrize("kind", HARDENED)
def test_a_flood_that_nobody_asked_for_breaks_the_plane(
    kind: PlaneKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_UNASKED", 50)
    with admitted_by_a_test(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_up(receiver)
        rows = b"" if kind is PlaneKind.SHARED_MEMORY else bytes(DISTRIBUTIONS.row_bytes)
        for serial in range(51):
            connection.write(announcement(serial, round_=serial) + rows)
        wait_until(lambda: receiver.discarded == 51)
        assert receiver.state is PlaneState.UP
        connection.write(announcement(51, round_=51) + rows)
        expect_break(receiver, "nobody asked")


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def a_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(file, WINDOW * DISTRIBUTIONS.max_bytes)
    return file


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (a_pipe, "not a memory file"),
        (a_file, "not a memory file"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "not a memory file"),
        (lambda: segment(seals=0), "not the one"),
        (lambda: segment(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not the one"),
        (lambda: segment(WINDOW * DISTRIBUTIONS.max_bytes - 1), "not the one"),
        (lambda: segment(1 << 40), "not the one"),
        (lambda: segment(0), "not the one"),
    ],
)
def test_a_segment_that_is_not_the_agreed_one_is_refused(
    make: Callable[[], int], reason: str
) -> None:
    with admitted_by_a_test(PlaneKind.SHARED_MEMORY) as (receiver, connection):
        file = make()
        connection.send_file(file)
        os.close(file)
        expect_break(receiver, reason)


def test_a_draft_that_hands_over_no_segment_is_refused() -> None:
    with admitted_by_a_test(PlaneKind.SHARED_MEMORY) as (receiver, connection):
        connection.write(b"\0")
        expect_break(receiver, "no segment")


@pytest.mark.parametrize("entry", [b"\xff" * 8, b"\x01\x00\x00\x00\x01\x00\x00\x00kv" * 100])
def test_the_store_of_a_group_is_bounded(entry: bytes) -> None:
    with admitted_by_a_test(GLOO) as (receiver, connection):
        connection.write(entry)
        expect_break(receiver, "in the store")


@pytest.mark.parametrize("answered", [[0], [5], [2**64 - 1]])
def test_a_target_that_answers_what_it_was_not_sent_breaks_the_plane(answered: list[int]) -> None:
    with dialled_by_a_test(PlaneKind.TCP) as (sender, connection):
        connection.write(b"".join(map(encode_serial, answered)))
        wait_until(lambda: sender.state is PlaneState.BROKEN)
        assert "not sent" in sender.reason
        assert sender.join(HANG_SECONDS)
