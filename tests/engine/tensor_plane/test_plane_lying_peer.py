"""A peer that lies breaks the plane: never the process, and never the memory of the other."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.tensor_plane import receiver as receiver_module
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.records import (
    ANNOUNCEMENT_BYTES,
    WINDOW,
    Announcement,
    encode_serial,
)
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneState
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.transports.connection import Connection
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms
from tests.engine.tensor_plane.gloo import GLOO
from tests.engine.tensor_plane.peer import DISTRIBUTIONS, wait_up
from tests.engine.tensor_plane.planes import (
    HARDENED,
    Clock,
    admitted_by_a_test,
    dialled_by_a_test,
    expect_break,
)
from tests.suite.scale import share
from tests.waiting import wait_until


def segment(size: int = WINDOW * DISTRIBUTIONS.max_bytes, seals: int | None = None) -> int:
    file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals is None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@contextmanager
def liar(kind: PlaneKind) -> Iterator[tuple[Receiver, Connection]]:
    """A draft whose plane is up, as far as the target knows."""
    with admitted_by_a_test(kind) as (receiver, connection):
        if kind is PlaneKind.SHARED_MEMORY:
            file = segment()
            connection.send_file(file)
            os.close(file)
        wait_up(receiver)
        yield receiver, connection


def announcement(serial: int = 0, num_rows: int = 1, round_: int = 1) -> bytes:
    return Announcement(serial, RowsKey(1, round_), num_rows).encode()


TERMS = PlaneTerms(PlaneKind.TCP, 1, DISTRIBUTIONS)
SAID = TERMS.encode()


@given(st.binary(min_size=ANNOUNCEMENT_BYTES, max_size=ANNOUNCEMENT_BYTES))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_any_bytes_are_an_announcement_or_break_the_plane(data: bytes) -> None:
    sound = b"ROWS" + data[4:]
    assert Announcement.decode(sound).encode() == sound
    if data[:4] != b"ROWS":
        with pytest.raises(PlaneBroken):
            Announcement.decode(data)


@given(st.integers(0, len(SAID) - 1), st.integers(1, 255), st.binary(max_size=100))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_terms_are_these_or_are_refused(place: int, change: int, noise: bytes) -> None:
    TERMS.check(SAID)
    changed = bytearray(SAID)
    changed[place] ^= change
    for data in (bytes(changed), SAID[:place], noise, SAID[:place] + noise):
        if data != SAID:
            with pytest.raises(ValueError):
                TERMS.check(data)


@pytest.mark.parametrize("kind", HARDENED)
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"X" * ANNOUNCEMENT_BYTES, "malformed"),  # as more bytes than were announced would be
        (announcement(num_rows=0), "0 rows"),
        (announcement(num_rows=7), "7 rows"),
        (announcement(num_rows=2**32 - 1), "4294967295 rows"),
        (announcement(serial=1), "announced as 1"),
        (announcement(serial=2**64 - 1), "announced as"),
    ],
)
def test_a_corrupted_header_breaks_the_plane(kind: PlaneKind, said: bytes, reason: str) -> None:
    with liar(kind) as (receiver, connection):
        connection.write(said)
        expect_break(receiver, reason)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, announcement()[:10]) for kind in HARDENED),
        (PlaneKind.TCP, announcement(num_rows=6) + b"\0" * 100),
    ],
)
def test_what_is_announced_and_does_not_come_breaks_the_plane_and_is_no_hang(
    kind: PlaneKind, said: bytes, clock: Clock
) -> None:
    with liar(kind) as (receiver, connection):
        receiver.expect(RowsKey(1, 1), 6)
        connection.write(said)
        assert receiver.receive(RowsKey(1, 1), 6, 0.05) is None
        assert receiver.state is PlaneState.UP  # only the plane's thread waits for the rest
        clock.pass_until_broken(receiver)
        expect_break(receiver, "too long")


@pytest.mark.parametrize("kind", HARDENED)
def test_a_flood_that_nobody_asked_for_breaks_the_plane(
    kind: PlaneKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_UNASKED", 50)
    with liar(kind) as (receiver, connection):
        rows = b"" if kind is PlaneKind.SHARED_MEMORY else bytes(DISTRIBUTIONS.row_bytes)
        for serial in range(51):
            connection.write(announcement(serial, round_=serial) + rows)
        wait_until(lambda: receiver.discarded == 51)
        assert receiver.state is PlaneState.UP
        connection.write(announcement(51, round_=51) + rows)
        expect_break(receiver, "nobody asked")


def a_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(file, WINDOW * DISTRIBUTIONS.max_bytes)
    return file


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (a_file, "not a memory file"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "not a memory file"),
        (lambda: segment(seals=0), "not the one"),
        (lambda: segment(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not the one"),
        (lambda: segment(WINDOW * DISTRIBUTIONS.max_bytes - 1), "not the one"),
        (lambda: segment(1 << 40), "not the one"),
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


@pytest.mark.parametrize(
    ("kind", "said", "reason"),
    [
        (PlaneKind.SHARED_MEMORY, b"\0", "no segment"),
        (GLOO, b"\xff" * 8, "in the store"),
        (GLOO, b"\x01\x00\x00\x00\x01\x00\x00\x00kv" * 100, "in the store"),
    ],
)
def test_a_draft_that_makes_no_plane_is_refused(kind: PlaneKind, said: bytes, reason: str) -> None:
    """It hands over no segment, or fills the store of a group, which is bounded."""
    with admitted_by_a_test(kind) as (receiver, connection):
        connection.write(said)
        expect_break(receiver, reason)


@pytest.mark.parametrize("answered", [0, 5, 2**64 - 1])
def test_a_target_that_answers_what_it_was_not_sent_breaks_the_plane(answered: int) -> None:
    with dialled_by_a_test(PlaneKind.TCP) as (sender, connection):
        connection.write(encode_serial(answered))
        wait_until(lambda: sender.state is PlaneState.BROKEN)
        assert "not sent" in sender.reason
