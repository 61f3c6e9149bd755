"""Who may join a plane, and where it listens for him."""

import itertools
import random
import socket
import struct
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.transports.address import listen
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
    cross,
    ended,
    every_kind,
    expect_break,
)
from tests.waiting import HANG_SECONDS, wait_until


@every_kind
def test_a_wrong_secret_is_refused_and_the_right_one_still_admitted(kind: PlaneKind) -> None:
    sender, answer = make_sender(kind)
    impostor = make_receiver(replace(answer, secret=bytes(32)))
    expect_break(impostor, "the draft has another secret")
    assert sender.state is PlaneState.CONNECTING
    receiver = make_receiver(answer)
    with ended(sender, receiver):
        wait_up(receiver, sender)
        cross(sender, receiver, RowsKey(1, 1), make_rows(1, 1))
        # The secret is spent: nobody listens any more.
        expect_break(make_receiver(answer), "cannot be reached")
        assert sender.state is receiver.state is PlaneState.UP


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
        receiver = make_receiver(answer, epoch, stream=replace(DISTRIBUTIONS, **change))
        expect_break(receiver, reason)
        wait_until(lambda end=sender: end.state is PlaneState.BROKEN)  # type: ignore[misc]
        assert reason in sender.reason
        assert sender.join(HANG_SECONDS)


def test_strangers_on_the_port_do_not_keep_the_target_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does a target of the first version, for which the verdict 2 is another version."""
    sender, answer = make_sender(PlaneKind.TCP)
    address = ("127.0.0.1", int(answer.address.split(":")[1]))
    hello = struct.pack("<8sHHIIQ32s", b"SSDPLANE", 1, 0, 1000, 6, 1, bytes(32))
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5, hello):
        with socket.create_connection(address) as stranger:
            stranger.sendall(said)
            if said is hello:
                verdict = stranger.recv(44, socket.MSG_WAITALL)[:12]
                assert struct.unpack("<8sI", verdict) == (b"SSDPLANE", 2)
    wait_until(lambda: "the target speaks version 1, this end 2" in caplog.text)
    receiver = make_receiver(answer)
    with ended(sender, receiver):
        wait_up(receiver, sender)


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
    with ended(sender, receiver):
        wait_up(receiver)


# Ports that a firewall lets pass


def free_ports(count: int) -> range:
    """That many neighbours, below those that the system hands out by itself to other tests."""
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    begins = (random.randrange(10_000, handed_out - count) for _ in itertools.count())
    return next(range(b, b + count) for b in begins if all(map(is_free, range(b, b + count))))


def is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((LOOPBACK, port))
        return True
    return False


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_planes_listen_within_the_ports_they_are_given() -> None:
    ports = free_ports(3)
    with ExitStack() as stack:
        listening = [listen(PlaneKind.TCP, LOOPBACK, ports) for _ in ports]
        for listener, _ in listening:
            stack.enter_context(listener)
        assert sorted(port_of(address) for _, address in listening) == list(ports)
        with pytest.raises(OSError, match=f"no port from {ports[0]} to {ports[-1]} is free"):
            listen(PlaneKind.TCP, LOOPBACK, ports)


def test_one_port_serves_one_plane_after_another() -> None:
    ports = free_ports(1)
    with ExitStack() as stack:
        for epoch in (1, 2):  # the first is still up when the second is made
            sender, answer = make_sender(PlaneKind.TCP, epoch, ports=ports)
            assert port_of(answer.address) == ports[0]
            receiver = make_receiver(answer, epoch)
            stack.enter_context(ended(sender, receiver))
            wait_up(receiver, sender)
