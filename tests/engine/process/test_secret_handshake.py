"""Two ends prove one secret to each other; who cannot is told apart, and learns nothing."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_engine.process.secret_handshake import (
    MAX_TERMS_BYTES,
    SecretHandshake,
    UnknownPeer,
    WrongSecret,
)
from tests.suite.scale import share
from tests.waiting import HANG_SECONDS

SECRET = b"a secret of the two"
HANDSHAKE = SecretHandshake(b"SSDTESTS", 3, host="inn", guest="traveller")
OPENING, PROOF = 44, 34


@dataclass
class Wire:
    """One end of a connection; keeps what was said on it."""

    connected: socket.socket
    said: bytearray = field(default_factory=bytearray)

    def read(self, size: int, deadline: float = 0.0) -> bytes:
        data = self.connected.recv(size, socket.MSG_WAITALL) if size else b""
        if len(data) < size:
            raise ConnectionError("closed")
        return data

    def write(self, data: bytes, deadline: float = 0.0) -> None:
        self.said += data
        self.connected.sendall(data)


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire]]:
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.settimeout(HANG_SECONDS)
        yield Wire(one), Wire(other)


def both(
    host: Callable[[Wire], object], guest: Callable[[Wire], object]
) -> tuple[object, object, bytes]:
    """What each of them returns or raises, and all that was said."""
    with wires() as (one, other), ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(host, one), threads.submit(guest, other)]
        results = [end.exception(HANG_SECONDS) or end.result() for end in ends]
        return results[0], results[1], bytes(one.said + other.said)


def admit(
    secret: bytes = SECRET, handshake: SecretHandshake = HANDSHAKE
) -> Callable[[Wire], bytes]:
    return lambda wire: handshake.admit(wire, secret, 0.0, b"terms of the inn")


def enter(
    secret: bytes = SECRET, handshake: SecretHandshake = HANDSHAKE
) -> Callable[[Wire], bytes]:
    return lambda wire: handshake.enter(wire, secret, 0.0, b"terms of the traveller")


def test_each_end_gets_the_terms_of_the_other_and_the_secret_is_not_sent() -> None:
    theirs, ours, said = both(admit(), enter())
    assert (theirs, ours) == (b"terms of the traveller", b"terms of the inn")
    assert SECRET not in said
    assert both(admit(), enter())[2] != said


def test_two_secrets_are_told_on_both_sides_and_the_terms_of_the_host_are_not() -> None:
    host, guest, said = both(admit(b"another secret"), enter())
    assert isinstance(host, WrongSecret)
    assert isinstance(guest, WrongSecret)
    assert str(host) == "it has another secret"
    assert str(guest) == "the inn has another secret"
    assert b"terms of the inn" not in said


@pytest.mark.parametrize(
    ("changes", "host_says", "guest_says"),
    [
        (
            {"version": 2},
            "the traveller speaks version 3, this end 2",
            "the inn speaks version 2, this end 3",
        ),
        (
            {"protocol": b"SSDOTHER"},
            "it is no traveller, or speaks another version",
            "it is no inn, or speaks another version",
        ),
    ],
)
def test_another_version_or_protocol_is_told_on_both_sides(
    changes: dict[str, Any], host_says: str, guest_says: str
) -> None:
    host, guest, _ = both(admit(handshake=replace(HANDSHAKE, **changes)), enter())
    assert (str(host), str(guest)) == (host_says, guest_says)
    for error in (host, guest):
        assert isinstance(error, UnknownPeer)
        assert not isinstance(error, WrongSecret)


@pytest.mark.parametrize("echoed", [True, False])
def test_a_host_that_makes_up_a_proof_or_echoes_the_guests_is_found_out(echoed: bool) -> None:
    def impostor(wire: Wire) -> None:
        wire.write(wire.read(OPENING))
        proof = wire.read(PROOF)
        wire.write(proof + wire.read(proof[-2]) if echoed else b"\1" * 32 + b"\0\0")

    _, guest, _ = both(impostor, enter())
    assert isinstance(guest, WrongSecret)
    assert str(guest) == "who answers there does not know the secret"


def test_a_guest_that_says_again_what_another_said_is_refused() -> None:
    with wires() as (one, other), ThreadPoolExecutor() as threads:
        admitted = threads.submit(admit(), one)
        enter()(other)
        assert admitted.result(HANG_SECONDS)
        said = bytes(other.said)
    host, _, _ = both(admit(), lambda wire: wire.write(said))
    assert isinstance(host, WrongSecret)


def test_a_guest_with_terms_that_it_did_not_prove_is_refused() -> None:
    class Forger(Wire):
        def write(self, data: bytes, deadline: float = 0.0) -> None:
            super().write(data.replace(b"terms", b"TERMS"), deadline)

    host, _, _ = both(admit(), lambda wire: enter()(Forger(wire.connected)))
    assert isinstance(host, WrongSecret)


def test_terms_without_end_are_not_read() -> None:
    def talker(wire: Wire) -> None:
        wire.write(wire.read(OPENING) + bytes(32) + (MAX_TERMS_BYTES + 1).to_bytes(2, "little"))

    host, _, _ = both(admit(), talker)
    assert isinstance(host, UnknownPeer)


@given(st.booleans(), st.binary(max_size=200))
@settings(max_examples=share(300), derandomize=True, deadline=None)
def test_no_bytes_are_a_proof(opens: bool, data: bytes) -> None:
    with wires() as (one, other):
        other.connected.sendall((b"SSDTESTS\3\0\0\0" if opens else b"") + data)
        other.connected.shutdown(socket.SHUT_WR)
        with pytest.raises((UnknownPeer, ConnectionError)):
            admit()(one)
