"""The tensor plane: what arrives, what does not, and what neither peer can do to the other."""

import fcntl
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ssd_engine.tensor_plane import (
    PlaneAnswer,
    PlaneBroken,
    PlaneKind,
    PlaneOffer,
    PlaneState,
    Receiver,
    RowsFormat,
    RowsKey,
    Sender,
    choose_kind,
    host_id,
    local_offer,
    open_receiver,
    open_sender,
)
from ssd_engine.tensor_plane import receiver as receiver_module
from ssd_engine.tensor_plane.address import listen
from ssd_engine.tensor_plane.connection import Connection, Wake, dial
from ssd_engine.tensor_plane.greeting import Terms, admit, greet
from ssd_engine.tensor_plane.process_group import NcclGroup, leave_nccl_errors_to_us
from ssd_engine.tensor_plane.records import (
    HELLO_BYTES,
    WINDOW,
    Announcement,
    Verdict,
    Welcome,
    encode_serial,
)
from ssd_engine.tensor_plane.state import TRANSITIONS, PlaneEvent, transition
from tests.plane_peer import (
    CPU,
    FORMAT,
    LOOPBACK,
    SOON,
    make_rows,
    peer,
    wait_for,
    wait_until,
)

PACKAGE = Path(receiver_module.__file__).parent
KINDS = [PlaneKind.SHARED_MEMORY, PlaneKind.TCP, PlaneKind.GLOO]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.value for kind in KINDS])
HARDENED = [PlaneKind.SHARED_MEMORY, PlaneKind.TCP]
SECRET = bytes(range(32))


@contextmanager
def plane(kind: PlaneKind, epoch: int = 1) -> Iterator[tuple[Sender, Receiver]]:
    """Both ends in this process, up."""
    sender, answer = open_sender(kind, epoch, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
    receiver = open_receiver(answer, epoch, rows=FORMAT, device=CPU)
    try:
        wait_for(sender, PlaneState.UP)
        wait_for(receiver, PlaneState.UP)
        yield sender, receiver
    finally:
        for end in (sender, receiver):
            end.close()
            assert end.join(SOON)


def same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.int16), other.view(torch.int16))


def expect_break(receiver: Receiver, reason: str) -> None:
    wait_until(lambda: receiver.state is PlaneState.BROKEN)
    with pytest.raises(PlaneBroken, match=reason):
        receiver.receive(RowsKey(1, 1, 0), 1, 5.0)
    assert receiver.join(SOON)


# --- the life of an end ---------------------------------------------------------------------------


def test_the_table_of_states_is_what_it_says() -> None:
    connecting, up, broken, closed = PlaneState
    wanted = {
        connecting: {"connected": up, "failed": broken, "close": closed},
        up: {"connected": None, "failed": broken, "close": closed},
        broken: {"connected": broken, "failed": broken, "close": closed},
        closed: {"connected": closed, "failed": closed, "close": closed},
    }
    for state, event in itertools.product(PlaneState, PlaneEvent):
        if wanted[state][event.value] is None:
            with pytest.raises(ValueError):
                transition(state, event)
        else:
            assert transition(state, event) is wanted[state][event.value]
    assert len(TRANSITIONS) == len(PlaneState) * len(PlaneEvent) - 1


def test_no_sequence_of_events_revives_a_plane() -> None:
    for events in itertools.product(PlaneEvent, repeat=5):
        state, over = PlaneState.CONNECTING, False
        for event in events:
            if (state, event) not in TRANSITIONS:
                break
            state = transition(state, event)
            over |= state in (PlaneState.BROKEN, PlaneState.CLOSED)
            assert not (over and state in (PlaneState.CONNECTING, PlaneState.UP))


@pytest.mark.parametrize("module", ["state", "handshake", "connection", "address"])
def test_what_is_not_about_tensors_knows_none(module: str) -> None:
    assert "import torch" not in (PACKAGE / f"{module}.py").read_text()


# --- the handshake --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ({}, {}, PlaneKind.SHARED_MEMORY),
        ({}, {"host_id": "other"}, PlaneKind.NCCL),
        ({}, {"host_id": "other", "device_id": "gpu0"}, PlaneKind.TCP),
        ({}, {"host_id": "other", "device_id": ""}, PlaneKind.TCP),
        ({"device_id": ""}, {"host_id": "other"}, PlaneKind.TCP),
        ({"host_id": ""}, {"host_id": "", "device_id": ""}, PlaneKind.TCP),
        ({}, {"kinds": (PlaneKind.GLOO, PlaneKind.NCCL), "device_id": "gpu0"}, PlaneKind.GLOO),
        ({}, {"kinds": (PlaneKind.SHARED_MEMORY,), "host_id": "other"}, None),
        ({}, {"kinds": ()}, None),
    ],
)
def test_the_kind_follows_from_both_offers(
    ours: dict[str, str], theirs: dict[str, str], kind: PlaneKind | None
) -> None:
    here = {"kinds": tuple(PlaneKind), "host_id": "host", "device_id": "gpu0", **ours}
    there = {"kinds": tuple(PlaneKind), "host_id": "host", "device_id": "gpu1", **theirs}
    assert choose_kind(PlaneOffer(**there), PlaneOffer(**here)) is kind
    assert choose_kind(PlaneOffer(**here), PlaneOffer(**there)) is kind


def test_two_processes_of_one_host_share_memory() -> None:
    with peer() as other:
        assert other.call("host_id") == host_id() != ""
    offer = local_offer(CPU)
    assert PlaneKind.NCCL not in offer.kinds
    assert choose_kind(offer, offer) is PlaneKind.SHARED_MEMORY


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(PlaneAnswer(PlaneKind.TCP, "127.0.0.1:1", b"secret"))


# --- rows -----------------------------------------------------------------------------------------


@every_kind
def test_rows_cross_between_processes_in_any_order(kind: PlaneKind) -> None:
    keys = {RowsKey(2**63 + s, r, f): 1 + f for s in range(3) for r in range(3) for f in (0, 5)}
    with peer() as draft:
        answer = draft.call("open_sender", kind, 7)
        receiver = open_receiver(answer, 7, rows=FORMAT, device=CPU)
        wait_for(receiver, PlaneState.UP)
        draft.call("wait_up")
        for key, num_rows in keys.items():
            receiver.expect(key, num_rows)
        for seed, (key, num_rows) in enumerate(keys.items()):
            assert draft.call("send", key, num_rows, seed)
        for seed, (key, num_rows) in reversed(list(enumerate(keys.items()))):
            assert same_bits(receiver.receive(key, num_rows, SOON), make_rows(seed, num_rows))
        assert (receiver.received, receiver.missing, receiver.discarded) == (len(keys), 0, 0)
        receiver.close()
        assert receiver.join(SOON)


@every_kind
def test_rows_that_are_not_there_are_missing_in_time_and_hurt_nothing(kind: PlaneKind) -> None:
    with plane(kind) as (sender, receiver):
        receiver.expect(RowsKey(1, 1, 0), 2)
        began = time.monotonic()
        assert receiver.receive(RowsKey(1, 1, 0), 2, 0.2) is None
        assert 0.2 <= time.monotonic() - began < 2.0
        assert receiver.receive(RowsKey(1, 1, 2), 2, 0.0) is None
        # Late rows of a key that is over are dropped, and the next round is not disturbed.
        sender.send(RowsKey(1, 1, 0), make_rows(1, 2))
        receiver.expect(RowsKey(1, 2, 0), 3)
        sender.send(RowsKey(1, 2, 0), make_rows(2, 3))
        assert same_bits(receiver.receive(RowsKey(1, 2, 0), 3, SOON), make_rows(2, 3))
        assert receiver.receive(RowsKey(1, 1, 0), 2, 0.0) is None
        assert (receiver.received, receiver.missing, receiver.discarded) == (1, 3, 1)


@every_kind
def test_another_number_of_rows_than_expected_is_missing(kind: PlaneKind) -> None:
    with plane(kind) as (sender, receiver):
        receiver.expect(RowsKey(1, 1, 0), 2)
        sender.send(RowsKey(1, 1, 0), make_rows(1, 3))
        assert receiver.receive(RowsKey(1, 1, 0), 2, 0.3) is None
        assert receiver.state is PlaneState.UP


def test_expectations_that_nobody_ends_are_given_up() -> None:
    sender, answer = open_sender(
        PlaneKind.SHARED_MEMORY, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU
    )
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU, max_expected=3)
    wait_for(receiver, PlaneState.UP)
    wait_for(sender, PlaneState.UP)
    for round_ in range(10):
        receiver.expect(RowsKey(1, round_, 0), 1)
    for round_ in range(10):
        sender.send(RowsKey(1, round_, 0), make_rows(round_, 1))
    assert same_bits(receiver.receive(RowsKey(1, 9, 0), 1, SOON), make_rows(9, 1))
    assert receiver.discarded == 7
    assert receiver.receive(RowsKey(1, 6, 0), 1, 0.0) is None
    assert receiver.receive(RowsKey(1, 7, 0), 1, 0.0) is not None
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(1, 999, dtype=torch.bfloat16),
        torch.zeros(7, 1000, dtype=torch.bfloat16),
        torch.zeros(0, 1000, dtype=torch.bfloat16),
        torch.zeros(1, 1000),
        torch.zeros(1000, dtype=torch.bfloat16),
    ],
)
def test_rows_of_another_format_are_an_error_of_the_caller(rows: torch.Tensor) -> None:
    with plane(PlaneKind.SHARED_MEMORY) as (sender, receiver):
        with pytest.raises(ValueError):
            sender.send(RowsKey(1, 1, 0), rows)
        with pytest.raises(ValueError):
            receiver.receive(RowsKey(1, 1, 0), 7, 0.0)
        assert sender.state is receiver.state is PlaneState.UP


def test_rows_need_not_be_contiguous() -> None:
    wide = make_rows(1, 6, RowsFormat(2000, torch.bfloat16, 6))
    for kind in KINDS:
        with plane(kind) as (sender, receiver):
            receiver.expect(RowsKey(1, 1, 0), 3)
            sender.send(RowsKey(1, 1, 0), wide[::2, ::2])
            assert same_bits(
                receiver.receive(RowsKey(1, 1, 0), 3, SOON), wide[::2, ::2].contiguous()
            )


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "max_rows"),
    [(0, torch.bfloat16, 1), (1, torch.bfloat16, 0), (1, torch.int64, 1), (2**30, torch.half, 9)],
)
def test_a_format_has_bounds(vocab_size: int, dtype: torch.dtype, max_rows: int) -> None:
    with pytest.raises(ValueError):
        RowsFormat(vocab_size, dtype, max_rows)


@pytest.mark.parametrize("key", [(-1, 0, 0), (2**64, 0, 0), (0, 2**32, 0), (0, 0, -1)])
def test_a_key_fits_its_record(key: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        RowsKey(*key)


# --- a peer that is slow, stopped or dead ---------------------------------------------------------


def test_until_it_is_up_nothing_is_sent_and_nothing_is_there() -> None:
    sender, answer = open_sender(
        PlaneKind.TCP, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU, connect_timeout_s=4.0
    )
    assert not sender.send(RowsKey(1, 1, 0), make_rows(1, 1))
    with socket.socket() as silent:  # accepts, and says nothing
        silent.bind((LOOPBACK, 0))
        silent.listen()
        address = f"{LOOPBACK}:{silent.getsockname()[1]}"
        receiver = open_receiver(
            PlaneAnswer(PlaneKind.TCP, address, answer.secret),
            1,
            rows=FORMAT,
            device=CPU,
            connect_timeout_s=4.0,
        )
        began = time.monotonic()
        assert receiver.receive(RowsKey(1, 1, 0), 1, SOON) is None
        assert time.monotonic() - began < 1.0
        expect_break(receiver, "too long")
    wait_until(lambda: sender.state is PlaneState.BROKEN)
    assert not sender.send(RowsKey(1, 1, 0), make_rows(1, 1))
    assert sender.dropped == 2
    assert sender.join(SOON)


@every_kind
def test_a_sender_that_is_killed_in_the_middle_breaks_the_plane_alone(kind: PlaneKind) -> None:
    with peer() as draft:
        answer = draft.call("open_sender", kind, 1, max_queued=1000)
        receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU)
        wait_for(receiver, PlaneState.UP)
        draft.call("wait_up")
        for round_ in range(200):
            receiver.expect(RowsKey(1, round_, 0), 6)
        draft.call("send_for_ever")
        assert same_bits(receiver.receive(RowsKey(1, 5, 0), 6, SOON), make_rows(5, 6))
        draft.kill()
        wait_until(lambda: receiver.state is PlaneState.BROKEN, 5.0)
        with pytest.raises(PlaneBroken):
            receiver.receive(RowsKey(1, 199, 0), 6, SOON)
        assert receiver.join(SOON)
        receiver.close()
    assert not left_behind([answer.address])


@every_kind
def test_a_receiver_that_is_killed_in_the_middle_breaks_the_plane_alone(kind: PlaneKind) -> None:
    with peer() as target:
        sender, answer = open_sender(kind, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
        target.call("open_receiver", answer, 1)
        target.call("wait_up")
        wait_for(sender, PlaneState.UP)
        target.call("receive_for_ever")
        for round_ in range(50):
            sender.send(RowsKey(1, round_, 0), make_rows(round_, 6))
        target.kill()
        wait_until(lambda: not sender.send(RowsKey(2, 1, 0), make_rows(1, 6)))
        assert sender.state is PlaneState.BROKEN
        assert sender.join(SOON)
        sender.close()
    assert not left_behind([answer.address])


@every_kind
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_peer_that_is_killed_while_it_connects_leaves_no_thread(
    kind: PlaneKind, role: str
) -> None:
    """It has been admitted, or has admitted, and goes no further."""
    wake = Wake()
    terms, deadline = Terms(kind, 1, FORMAT), time.monotonic() + SOON
    if role == "draft":
        listener, address = listen(kind, LOOPBACK)
        answer = PlaneAnswer(kind, address, SECRET)
        end: Sender | Receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU)
        connection = admit(listener, wake, terms, SECRET, deadline)
        listener.close()
    else:
        end, answer = open_sender(kind, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
        connection = dial(*dialled_by_a_test(answer), wake, deadline)
        greet(connection, terms, answer.secret, deadline)
    connection.close()
    wait_until(lambda: end.state is PlaneState.BROKEN)
    assert end.join(SOON)
    wake.close()


def dialled_by_a_test(answer: PlaneAnswer) -> tuple[int, str | tuple[str, int]]:
    if answer.kind is PlaneKind.SHARED_MEMORY:
        return socket.AF_UNIX, "\0" + answer.address
    host, port = answer.address.split(":")
    return socket.AF_INET, (host, int(port))


@every_kind
def test_a_target_that_does_not_read_costs_the_draft_its_oldest_rows(kind: PlaneKind) -> None:
    with peer() as target:
        sender, answer = open_sender(
            kind, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU, max_queued=8
        )
        target.call("open_receiver", answer, 1)
        target.call("wait_up")
        wait_for(sender, PlaneState.UP)
        target.stop()
        rows, longest = make_rows(1, 6), 0.0
        for round_ in range(300):
            began = time.monotonic()
            assert sender.send(RowsKey(1, round_, 0), rows)
            longest = max(longest, time.monotonic() - began)
        assert longest < 1.0
        wait_until(lambda: sender.sent == WINDOW)
        assert sender.dropped >= 300 - WINDOW - 8
        target.go_on()
        wait_until(lambda: sender.sent + sender.dropped == 300)
        assert sender.sent >= 8
        assert sender.state is PlaneState.UP
        sender.close()
        assert sender.join(SOON)


@every_kind
def test_a_draft_that_is_stopped_costs_the_target_its_wait_and_no_more(kind: PlaneKind) -> None:
    with peer() as draft:
        receiver = open_receiver(draft.call("open_sender", kind, 1), 1, rows=FORMAT, device=CPU)
        wait_for(receiver, PlaneState.UP)
        draft.call("wait_up")
        draft.stop()
        receiver.expect(RowsKey(1, 1, 0), 1)
        began = time.monotonic()
        assert receiver.receive(RowsKey(1, 1, 0), 1, 0.1) is None
        receiver.close()
        assert time.monotonic() - began < 1.0
        assert receiver.join(1.0)
        with pytest.raises(PlaneBroken, match="closed"):
            receiver.receive(RowsKey(1, 2, 0), 1, 5.0)


# --- a peer that lies -----------------------------------------------------------------------------


@contextmanager
def lying_draft(kind: PlaneKind) -> Iterator[tuple[Receiver, Connection]]:
    """A receiver that has been admitted by a test, which now says what it likes."""
    wake = Wake()
    listener, address = listen(kind, LOOPBACK)
    receiver = open_receiver(PlaneAnswer(kind, address, SECRET), 1, rows=FORMAT, device=CPU)
    with listener:
        terms = Terms(kind, 1, FORMAT)
        connection = admit(listener, wake, terms, SECRET, time.monotonic() + SOON)
    try:
        yield receiver, connection
    finally:
        connection.close()
        wake.close()
        receiver.close()
        assert receiver.join(SOON)


def segment(size: int = WINDOW * FORMAT.max_bytes, seals: int | None = None) -> int:
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
    return Announcement(serial, RowsKey(1, round_, 0), num_rows).encode()


@pytest.mark.parametrize("kind", HARDENED)
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"X" * 32, "malformed"),
        (announcement(num_rows=0), "0 rows"),
        (announcement(num_rows=7), "7 rows"),
        (announcement(num_rows=2**32 - 1), "4294967295 rows"),
        (announcement(serial=1), "announced as 1"),
        (announcement(serial=2**64 - 1), "announced as"),
    ],
)
def test_a_corrupted_header_breaks_the_plane(kind: PlaneKind, said: bytes, reason: str) -> None:
    with lying_draft(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_for(receiver, PlaneState.UP)
        connection.write(said)
        expect_break(receiver, reason)


@pytest.mark.parametrize("kind", HARDENED)
def test_half_a_header_is_a_broken_plane_and_no_hang(
    kind: PlaneKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_engine.tensor_plane.connection.STALL_SECONDS", 1.0)
    with lying_draft(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_for(receiver, PlaneState.UP)
        connection.write(announcement()[:10])
        expect_break(receiver, "too long")


def test_rows_that_are_announced_and_do_not_come_break_the_plane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ssd_engine.tensor_plane.connection.STALL_SECONDS", 4.0)
    with lying_draft(PlaneKind.TCP) as (receiver, connection):
        wait_for(receiver, PlaneState.UP)
        receiver.expect(RowsKey(1, 1, 0), 6)
        connection.write(announcement(num_rows=6) + b"\0" * 100)
        began = time.monotonic()
        assert receiver.receive(RowsKey(1, 1, 0), 6, 0.05) is None
        assert time.monotonic() - began < 0.8
        expect_break(receiver, "too long")


def test_more_bytes_than_announced_break_the_plane_not_the_process() -> None:
    with lying_draft(PlaneKind.TCP) as (receiver, connection):
        wait_for(receiver, PlaneState.UP)
        receiver.expect(RowsKey(1, 1, 0), 1)
        connection.write(announcement() + b"\0" * (FORMAT.row_bytes + 64))
        expect_break(receiver, "malformed")


@pytest.mark.parametrize("kind", HARDENED)
def test_a_flood_that_nobody_asked_for_breaks_the_plane(
    kind: PlaneKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_UNASKED", 50)
    with lying_draft(kind) as (receiver, connection):
        start_lying(kind, connection)
        wait_for(receiver, PlaneState.UP)
        rows = b"" if kind is PlaneKind.SHARED_MEMORY else bytes(FORMAT.row_bytes)
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
    os.ftruncate(file, WINDOW * FORMAT.max_bytes)
    return file


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (a_pipe, "not a memory file"),
        (a_file, "not a memory file"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "not a memory file"),
        (lambda: segment(seals=0), "not the one"),
        (lambda: segment(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not the one"),
        (lambda: segment(WINDOW * FORMAT.max_bytes - 1), "not the one"),
        (lambda: segment(1 << 40), "not the one"),
        (lambda: segment(0), "not the one"),
    ],
)
def test_a_segment_that_is_not_the_agreed_one_is_refused(
    make: Callable[[], int], reason: str
) -> None:
    with lying_draft(PlaneKind.SHARED_MEMORY) as (receiver, connection):
        file = make()
        connection.send_file(file)
        os.close(file)
        expect_break(receiver, reason)


def test_a_draft_that_hands_over_no_segment_is_refused() -> None:
    with lying_draft(PlaneKind.SHARED_MEMORY) as (receiver, connection):
        connection.write(b"\0")
        expect_break(receiver, "no segment")


@pytest.mark.parametrize("entry", [b"\xff" * 8, b"\x01\x00\x00\x00\x01\x00\x00\x00kv" * 100])
def test_the_store_of_a_group_is_bounded(entry: bytes) -> None:
    with lying_draft(PlaneKind.GLOO) as (receiver, connection):
        connection.write(entry)
        expect_break(receiver, "in the store")


def test_a_draft_that_makes_no_group_costs_a_thread_its_timeout_and_nobody_else() -> None:
    wake = Wake()
    listener, address = listen(PlaneKind.GLOO, LOOPBACK)
    answer = PlaneAnswer(PlaneKind.GLOO, address, SECRET)
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU, connect_timeout_s=2.0)
    terms = Terms(PlaneKind.GLOO, 1, FORMAT)
    connection = admit(listener, wake, terms, SECRET, time.monotonic() + SOON)
    longest, last = 0.0, time.monotonic()
    while receiver.state is PlaneState.CONNECTING:
        with suppress(PlaneBroken):  # it may end between the two lines
            assert receiver.receive(RowsKey(1, 1, 0), 1, SOON) is None
        time.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < 0.5
    expect_break(receiver, "too long")
    connection.close()
    listener.close()
    wake.close()


@pytest.mark.parametrize("answered", [[0], [5], [2**64 - 1]])
def test_a_target_that_answers_what_it_was_not_sent_breaks_the_plane(answered: list[int]) -> None:
    wake = Wake()
    sender, answer = open_sender(PlaneKind.TCP, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
    deadline = time.monotonic() + SOON
    connection = dial(*dialled_by_a_test(answer), wake, deadline)
    greet(connection, Terms(PlaneKind.TCP, 1, FORMAT), answer.secret, deadline)
    connection.write(b"".join(map(encode_serial, answered)))
    wait_until(lambda: sender.state is PlaneState.BROKEN)
    assert "not sent" in sender.reason
    assert sender.join(SOON)
    connection.close()
    wake.close()


# --- who may join ---------------------------------------------------------------------------------


@every_kind
def test_a_wrong_secret_is_refused_and_the_right_one_still_admitted(kind: PlaneKind) -> None:
    sender, answer = open_sender(kind, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
    impostor = open_receiver(
        PlaneAnswer(kind, answer.address, bytes(32)), 1, rows=FORMAT, device=CPU
    )
    expect_break(impostor, "wrong secret")
    assert sender.state is PlaneState.CONNECTING
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU)
    wait_for(receiver, PlaneState.UP)
    receiver.expect(RowsKey(1, 1, 0), 1)
    wait_for(sender, PlaneState.UP)
    sender.send(RowsKey(1, 1, 0), make_rows(1, 1))
    assert receiver.receive(RowsKey(1, 1, 0), 1, SOON) is not None
    # The secret is spent: nobody listens any more.
    second = open_receiver(answer, 1, rows=FORMAT, device=CPU)
    expect_break(second, "cannot be reached")
    assert sender.state is receiver.state is PlaneState.UP
    sender.close()
    receiver.close()


def test_a_draft_that_does_not_know_the_secret_is_left() -> None:
    wake = Wake()
    listener, address = listen(PlaneKind.TCP, LOOPBACK)
    answer = PlaneAnswer(PlaneKind.TCP, address, SECRET)
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU)
    connection = listener_accept(listener, wake)
    connection.read(HELLO_BYTES)
    connection.write(Welcome(Verdict.ADMITTED).encode())
    expect_break(receiver, "does not know the secret")
    connection.close()
    listener.close()
    wake.close()


def listener_accept(listener: socket.socket, wake: Wake) -> Connection:
    listener.setblocking(True)
    return Connection(listener.accept()[0], wake)


@pytest.mark.parametrize(
    ("epoch", "rows", "reason"),
    [
        (2, FORMAT, "other epoch"),
        (0, FORMAT, "other epoch"),
        (1, RowsFormat(1001, torch.bfloat16, 6), "other format"),
        (1, RowsFormat(1000, torch.float16, 6), "other format"),
        (1, RowsFormat(1000, torch.bfloat16, 7), "other format"),
    ],
)
def test_another_epoch_or_format_is_refused(epoch: int, rows: RowsFormat, reason: str) -> None:
    for kind in KINDS:
        sender, answer = open_sender(kind, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
        receiver = open_receiver(answer, epoch, rows=rows, device=CPU)
        expect_break(receiver, reason)
        wait_until(lambda end=sender: end.state is PlaneState.BROKEN)  # type: ignore[misc]
        assert reason in sender.reason
        assert sender.join(SOON)


def test_strangers_on_the_port_do_not_keep_the_target_out() -> None:
    sender, answer = open_sender(PlaneKind.TCP, 1, bind_host=LOOPBACK, rows=FORMAT, device=CPU)
    _, address = dialled_by_a_test(answer)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5):
        with socket.create_connection(address) as stranger:  # type: ignore[arg-type]
            stranger.sendall(said)
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU)
    wait_for(receiver, PlaneState.UP)
    wait_for(sender, PlaneState.UP)
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (PlaneKind.SHARED_MEMORY, "/tmp/socket"),
        (PlaneKind.SHARED_MEMORY, "ssd-plane-../../etc/passwd"),
        (PlaneKind.SHARED_MEMORY, ""),
        (PlaneKind.TCP, "127.0.0.1"),
        (PlaneKind.TCP, "127.0.0.1:0"),
        (PlaneKind.TCP, "127.0.0.1:99999"),
        (PlaneKind.TCP, "127.0.0.1:٣"),
        (PlaneKind.TCP, "0.0.0.0:80"),
        (PlaneKind.GLOO, ":80"),
    ],
)
def test_an_address_that_is_none_is_refused(kind: PlaneKind, address: str) -> None:
    receiver = open_receiver(PlaneAnswer(kind, address, SECRET), 1, rows=FORMAT, device=CPU)
    expect_break(receiver, "address")


@pytest.mark.parametrize("kind", [PlaneKind.TCP, PlaneKind.GLOO])
@pytest.mark.parametrize(
    ("bind_host", "dial_host"), [("0.0.0.0", LOOPBACK), ("::1", None), ("::", "::1")]
)
def test_the_target_dials_the_host_that_it_was_told(
    kind: PlaneKind, bind_host: str, dial_host: str | None
) -> None:
    try:
        sender, answer = open_sender(kind, 1, bind_host=bind_host, rows=FORMAT, device=CPU)
    except OSError:
        pytest.skip("no IPv6 here")
    receiver = open_receiver(answer, 1, rows=FORMAT, device=CPU, dial_host=dial_host)
    wait_for(receiver, PlaneState.UP)
    receiver.close()
    assert receiver.join(SOON)
    assert sender.join(SOON)


# --- ports that a firewall lets pass --------------------------------------------------------------


def free_ports(count: int) -> range:
    """That many neighbours, free a moment ago."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            low = int(probe.getsockname()[1])
        ports = range(low, low + count)
        if low + count < 65_536 and all(is_free(port) for port in ports):
            return ports


def is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((LOOPBACK, port))
        return True
    return False


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_planes_listen_within_the_ports_they_are_given() -> None:
    ports = free_ports(3)
    listening = [listen(PlaneKind.TCP, LOOPBACK, ports) for _ in ports]
    assert sorted(port_of(address) for _, address in listening) == list(ports)
    with pytest.raises(OSError, match=f"no port from {ports[0]} to {ports[-1]} is free"):
        listen(PlaneKind.TCP, LOOPBACK, ports)
    for listener, _ in listening:
        listener.close()


def test_one_port_serves_one_plane_after_another() -> None:
    ports = free_ports(1)
    ends = []
    for epoch in (1, 2):  # the first is still up when the second is made
        sender, answer = open_sender(
            PlaneKind.TCP, epoch, bind_host=LOOPBACK, rows=FORMAT, device=CPU, ports=ports
        )
        assert port_of(answer.address) == ports[0]
        receiver = open_receiver(answer, epoch, rows=FORMAT, device=CPU)
        wait_for(receiver, PlaneState.UP)
        wait_for(sender, PlaneState.UP)
        ends += [receiver, sender]
    for end in ends:
        end.close()
    assert all(end.join(SOON) for end in ends)


def test_with_ports_given_nothing_is_chosen_that_takes_others() -> None:
    far = PlaneOffer(tuple(PlaneKind), "there", "gpu-1")
    near = PlaneOffer(tuple(PlaneKind), "here", "gpu-0")
    assert choose_kind(far, near) is PlaneKind.NCCL
    assert choose_kind(far, near, fixed_ports=True) is PlaneKind.TCP
    only = PlaneOffer((PlaneKind.NCCL, PlaneKind.GLOO), "there", "gpu-1")
    assert choose_kind(only, near, fixed_ports=True) is None


# --- again and again ------------------------------------------------------------------------------


def left_behind(addresses: Collection[str]) -> set[str]:
    """Those of these planes' names that the system still knows, as a socket or as a segment."""
    sockets = re.findall(r"ssd-plane-\S+", Path("/proc/net/unix").read_text())
    return {*sockets, *os.listdir("/dev/shm")} & set(addresses)


def held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@every_kind
def test_a_plane_is_remade_as_often_as_it_breaks(kind: PlaneKind) -> None:
    with plane(kind, 1):
        pass
    before, addresses = held(), []
    for epoch in range(2, 22):
        early = epoch % 5 == 0  # before it is up
        seconds = 0.3 if early else SOON
        sender, answer = open_sender(
            kind,
            epoch,
            bind_host=LOOPBACK,
            rows=FORMAT,
            device=CPU,
            connect_timeout_s=seconds,
        )
        receiver = open_receiver(answer, epoch, rows=FORMAT, device=CPU, connect_timeout_s=seconds)
        addresses.append(answer.address)
        if early:
            (sender if epoch % 2 else receiver).abort("while it connects")
        else:
            wait_for(receiver, PlaneState.UP)
            wait_for(sender, PlaneState.UP)
            key = RowsKey(1, epoch, 0)
            receiver.expect(key, 2)
            sender.send(key, make_rows(epoch, 2))
            assert same_bits(receiver.receive(key, 2, SOON), make_rows(epoch, 2))
            receiver.expect(RowsKey(1, epoch, 2), 1)  # left open
            sender.send(RowsKey(1, epoch, 4), make_rows(epoch, 1))  # nobody's
            (sender if epoch % 2 else receiver).abort("for the test")
        for end in (sender, receiver):
            assert end.join(SOON)
            assert end.state is PlaneState.BROKEN
            end.close()
    if kind is PlaneKind.SHARED_MEMORY:  # a port may be given again, a name is not
        assert len(set(addresses)) == 20
    assert not left_behind(addresses)
    wait_until(lambda: held()[0] <= before[0] + 1 and held()[1] <= before[1] + 1)


def test_closing_wakes_whoever_waits() -> None:
    with plane(PlaneKind.SHARED_MEMORY) as (_, receiver):
        timer = threading.Timer(0.2, receiver.close)
        timer.start()
        began = time.monotonic()
        with pytest.raises(PlaneBroken):
            receiver.receive(RowsKey(1, 1, 0), 1, SOON)
        assert time.monotonic() - began < SOON / 2
        receiver.close()
        receiver.abort()
        assert receiver.state is PlaneState.CLOSED


def test_a_process_ends_well_with_its_planes_open() -> None:
    program = """
        import time, torch
        from ssd_engine.tensor_plane import *
        rows, cpu = RowsFormat(1000, torch.bfloat16, 6), torch.device("cpu")
        for kind in (PlaneKind.SHARED_MEMORY, PlaneKind.TCP, PlaneKind.GLOO):
            sender, answer = open_sender(kind, 1, bind_host="127.0.0.1", rows=rows, device=cpu)
            receiver = open_receiver(answer, 1, rows=rows, device=cpu)
            while receiver.state is not PlaneState.UP or sender.state is not PlaneState.UP:
                time.sleep(0.001)
            receiver.expect(RowsKey(1, 1, 0), 1)
            sender.send(RowsKey(1, 1, 0), torch.zeros(1, 1000, dtype=torch.bfloat16))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- devices --------------------------------------------------------------------------------------


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@every_kind
def test_rows_go_from_device_to_device(kind: PlaneKind) -> None:
    cuda, format_ = torch.device("cuda", 0), RowsFormat(150_000, torch.bfloat16, 6)
    sender, answer = open_sender(kind, 1, bind_host=LOOPBACK, rows=format_, device=cuda)
    receiver = open_receiver(answer, 1, rows=format_, device=cuda)
    wait_for(receiver, PlaneState.UP)
    wait_for(sender, PlaneState.UP)
    for round_ in range(20):
        key, rows = RowsKey(1, round_, 0), torch.randn(6, 150_000, device=cuda).bfloat16()
        receiver.expect(key, 6)
        sender.send(key, rows)
        torch.cuda._sleep(10_000_000)  # the engine goes on computing
        landed = receiver.receive(key, 6, SOON)
        assert landed is not None
        assert landed.device == cuda
        assert torch.equal(landed, rows)
    sender.close()
    receiver.close()


@pytest.mark.gpu
@needs_gpu
def test_rows_do_not_wait_for_what_was_launched_after_them() -> None:
    cuda = torch.device("cuda", 0)
    sender, answer = open_sender(
        PlaneKind.SHARED_MEMORY, 1, bind_host=LOOPBACK, rows=FORMAT, device=cuda
    )
    receiver = open_receiver(answer, 1, rows=FORMAT, device=cuda)
    wait_for(receiver, PlaneState.UP)
    wait_for(sender, PlaneState.UP)
    rows = make_rows(1, 6).to(cuda)
    for round_ in range(3):  # the first has the warm-up in it
        torch.cuda.synchronize()
        receiver.expect(RowsKey(1, round_, 0), 6)
        began = time.monotonic()
        sender.send(RowsKey(1, round_, 0), rows)
        torch.cuda._sleep(2_000_000_000)  # about a second
        launched = time.monotonic() - began
        assert receiver.receive(RowsKey(1, round_, 0), 6, SOON) is not None
        waited = time.monotonic() - began
    assert launched < 0.2
    assert waited < 0.5
    torch.cuda.synchronize()
    sender.close()
    receiver.close()


@pytest.mark.gpu
@needs_gpu
def test_a_communicator_can_be_made_and_aborted_again_and_again() -> None:
    leave_nccl_errors_to_us()
    device = torch.device("cuda", 0)
    for epoch in range(5):
        store = dist.PrefixStore(f"epoch {epoch}", dist.HashStore())
        group = NcclGroup(store, 0, device, lambda: False, size=1)
        group.abort()


@pytest.mark.gpu
@needs_gpu
def test_a_communicator_that_cannot_be_made_breaks_the_plane_alone() -> None:
    """NCCL before 2.30 refuses two ranks on one device; later ones carry the rows."""
    cuda = torch.device("cuda", 0)
    sender, answer = open_sender(
        PlaneKind.NCCL, 1, bind_host=LOOPBACK, rows=FORMAT, device=cuda, connect_timeout_s=SOON
    )
    receiver = open_receiver(answer, 1, rows=FORMAT, device=cuda, connect_timeout_s=SOON)
    wait_until(lambda: receiver.state is not PlaneState.CONNECTING, 2 * SOON)
    wait_until(lambda: sender.state is receiver.state)
    if receiver.state is PlaneState.UP:
        receiver.expect(RowsKey(1, 1, 0), 6)
        sender.send(RowsKey(1, 1, 0), make_rows(1, 6).to(cuda))
        assert receiver.receive(RowsKey(1, 1, 0), 6, SOON) is not None
    sender.close()
    receiver.close()
    assert sender.join(SOON)
    assert receiver.join(SOON)


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_go_from_one_device_to_another_by_nccl() -> None:
    format_ = RowsFormat(150_000, torch.bfloat16, 6)
    for epoch in range(1, 4):
        sender, answer = open_sender(
            PlaneKind.NCCL, epoch, bind_host=LOOPBACK, rows=format_, device=torch.device("cuda", 0)
        )
        receiver = open_receiver(answer, epoch, rows=format_, device=torch.device("cuda", 1))
        wait_for(receiver, PlaneState.UP)
        wait_for(sender, PlaneState.UP)
        rows = make_rows(epoch, 6, format_).to("cuda:0")
        receiver.expect(RowsKey(1, 1, 0), 6)
        sender.send(RowsKey(1, 2, 0), rows)  # nobody's
        sender.send(RowsKey(1, 1, 0), rows)
        landed = receiver.receive(RowsKey(1, 1, 0), 6, SOON)
        assert landed is not None
        assert landed.device == torch.device("cuda", 1)
        assert torch.equal(landed.cpu(), rows.cpu())
        (sender if epoch % 2 else receiver).abort("for the test")
        assert sender.join(SOON)
        assert receiver.join(SOON)
