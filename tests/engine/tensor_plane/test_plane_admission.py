"""Who may join a plane, and where it listens for him."""

import random
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_engine.process.secret_handshake import UnknownPeer
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.transports.address import listen
from ssd_engine.tensor_plane.transports.connection import Connection, Wake
from ssd_engine.tensor_plane.transports.greeting import HANDSHAKE
from tests.engine.tensor_plane.gloo import GLOO
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    LOOPBACK,
    make_receiver,
    make_rows,
    make_sender,
    wait_up,
)
from tests.engine.tensor_plane.planes import (
    KINDS,
    SECRET,
    every_kind,
    expect_break,
    far_off,
    place_of,
)
from tests.waiting import HANG_SECONDS, wait_until


@every_kind
def test_a_wrong_secret_is_refused_and_the_right_one_still_admitted(kind: PlaneKind) -> None:
    sender, answer = make_sender(kind)
    impostor = make_receiver(replace(answer, secret=bytes(32)))
    expect_break(impostor, "the draft has another secret")
    assert sender.state is PlaneState.CONNECTING
    receiver = make_receiver(answer)
    wait_up(receiver, sender)
    receiver.expect(RowsKey(1, 1), 1)
    sender.send(RowsKey(1, 1), make_rows(1, 1))
    assert receiver.receive(RowsKey(1, 1), 1, HANG_SECONDS) is not None
    # The secret is spent: nobody listens any more.
    second = make_receiver(answer)
    expect_break(second, "cannot be reached")
    assert sender.state is receiver.state is PlaneState.UP
    sender.close()
    receiver.close()


def test_a_draft_that_does_not_know_the_secret_is_left() -> None:
    wake = Wake()
    listener, address = listen(PlaneKind.TCP, LOOPBACK)
    receiver = make_receiver(PlaneAnswer(PlaneKind.TCP, address, SECRET, DISTRIBUTIONS))
    listener.setblocking(True)
    connection = Connection(listener.accept()[0], wake)
    connection.write(connection.read(44))  # its opening is as good as another
    connection.write(b"\1" * 32 + b"\0\0")  # a proof that it made up
    expect_break(receiver, "does not know the secret")
    connection.close()
    listener.close()
    wake.close()


def test_a_target_of_another_version_is_told_and_the_right_one_still_admitted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first version's hello, and what it took for a verdict: 2 was another version."""
    sender, answer = make_sender(PlaneKind.TCP)
    _, address = place_of(answer)
    hello = struct.pack("<8sHHIIQ32s", b"SSDPLANE", 1, 0, 1000, 6, 1, bytes(32))
    with socket.create_connection(address) as older:  # type: ignore[arg-type]
        older.sendall(hello)
        magic, verdict = struct.unpack("<8sI", older.recv(44, socket.MSG_WAITALL)[:12])
        assert (magic, verdict) == (b"SSDPLANE", 2)
        wait_until(lambda: "the target speaks version 1, this end 2" in caplog.text)
    receiver = make_receiver(answer)
    wait_up(receiver, sender)
    sender.close()
    receiver.close()


def test_a_draft_of_another_version_is_left_with_its_number() -> None:
    newer, wake = replace(HANDSHAKE, version=3), Wake()
    listener, address = listen(PlaneKind.TCP, LOOPBACK)
    receiver = make_receiver(PlaneAnswer(PlaneKind.TCP, address, SECRET, DISTRIBUTIONS))
    listener.setblocking(True)
    connection = Connection(listener.accept()[0], wake)
    with pytest.raises(UnknownPeer, match="the target speaks version 2, this end 3"):
        newer.admit(connection, SECRET, far_off())
    expect_break(receiver, "the draft speaks version 3, this end 2")
    connection.close()
    listener.close()
    wake.close()


@pytest.mark.parametrize(
    ("epoch", "change", "reason"),
    [
        (2, {}, "other epoch"),
        (0, {}, "other epoch"),
        (1, {"name": "features"}, "other name"),
        (1, {"width": 1001}, "other width"),
        (1, {"dtype": "float16"}, "other dtype"),
        (1, {"max_rows": 7}, "other max_rows"),
    ],
)
def test_other_terms_are_refused_by_name(epoch: int, change: dict[str, Any], reason: str) -> None:
    for kind in KINDS:
        sender, answer = make_sender(kind)
        receiver = make_receiver(answer, epoch, replace(DISTRIBUTIONS, **change))
        expect_break(receiver, reason)
        wait_until(lambda end=sender: end.state is PlaneState.BROKEN)  # type: ignore[misc]
        assert reason in sender.reason
        assert sender.join(HANG_SECONDS)


def test_strangers_on_the_port_do_not_keep_the_target_out() -> None:
    sender, answer = make_sender(PlaneKind.TCP)
    _, address = place_of(answer)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5):
        with socket.create_connection(address) as stranger:  # type: ignore[arg-type]
            stranger.sendall(said)
    receiver = make_receiver(answer)
    wait_up(receiver, sender)
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
        (PlaneKind.TCP, ":80"),
    ],
)
def test_an_address_that_is_none_is_refused(kind: PlaneKind, address: str) -> None:
    expect_break(make_receiver(PlaneAnswer(kind, address, SECRET, DISTRIBUTIONS)), "address")


@pytest.mark.parametrize("kind", [PlaneKind.TCP, GLOO])
@pytest.mark.parametrize(
    ("bind_host", "dial_host"), [("0.0.0.0", LOOPBACK), ("::1", None), ("::", "::1")]
)
def test_the_target_dials_the_host_that_it_was_told(
    kind: PlaneKind, bind_host: str, dial_host: str | None
) -> None:
    try:
        sender, answer = make_sender(kind, bind_host=bind_host)
    except OSError:
        pytest.skip("no IPv6 here")
    receiver = make_receiver(answer, dial_host=dial_host)
    wait_up(receiver)
    receiver.close()
    assert receiver.join(HANG_SECONDS)
    assert sender.join(HANG_SECONDS)


# Ports that a firewall lets pass


def free_ports(count: int) -> range:
    """That many neighbours, below those that the system hands out by itself to other tests."""
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    while True:
        low = random.randrange(10_000, int(handed_out) - count)
        if all(is_free(port) for port in range(low, low + count)):
            return range(low, low + count)


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
        sender, answer = make_sender(PlaneKind.TCP, epoch, ports=ports)
        assert port_of(answer.address) == ports[0]
        receiver = make_receiver(answer, epoch)
        wait_up(receiver, sender)
        ends += [receiver, sender]
    for end in ends:
        end.close()
    assert all(end.join(HANG_SECONDS) for end in ends)
