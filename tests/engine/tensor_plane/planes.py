"""Planes whose ends a test holds, one of them or both, and the clock by which they give up."""

import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.tensor_plane.end import PlaneEnd
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneEvent, PlaneState
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports import connection as connection_module
from ssd_engine.tensor_plane.transports.address import listen
from ssd_engine.tensor_plane.transports.connection import Connection, Wake
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms, admit, enter
from tests.engine.tensor_plane.gloo import GLOO
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    LOOPBACK,
    NO_LIMIT,
    make_receiver,
    make_sender,
    wait_up,
)
from tests.waiting import HANG_SECONDS, wait_until

KINDS = [PlaneKind.SHARED_MEMORY, PlaneKind.TCP, GLOO]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.value for kind in KINDS])
HARDENED = [PlaneKind.SHARED_MEMORY, PlaneKind.TCP]
SECRET = bytes(range(32))


def far_off() -> float:
    """A deadline that is not met, by the clock of the planes."""
    return connection_module.time.monotonic() + NO_LIMIT


@contextmanager
def ended(*ends: PlaneEnd) -> Iterator[None]:
    """Afterwards they are closed, and their threads have ended."""
    try:
        yield
    finally:
        for end in ends:
            end.close()
            assert end.join(HANG_SECONDS)


@contextmanager
def plane(
    kind: PlaneKind, epoch: int = 1, max_expected: int = 256, **options: Any
) -> Iterator[tuple[Sender, Receiver]]:
    """Both ends in this process, up."""
    sender, answer = make_sender(kind, epoch, **options)
    receiver = make_receiver(answer, epoch, max_expected=max_expected, **options)
    with ended(sender, receiver):
        wait_up(receiver, sender)
        yield sender, receiver


def cross(sender: Sender, receiver: Receiver, key: RowsKey, rows: torch.Tensor) -> None:
    """These rows go from one end to the other."""
    receiver.expect(key, len(rows))
    assert sender.send(key, rows)
    assert same_bits(receiver.receive(key, len(rows), HANG_SECONDS), rows)


@contextmanager
def admitted_by_a_test(kind: PlaneKind) -> Iterator[tuple[Receiver, Connection]]:
    """A receiver, and the other end of its connection: a draft that says what a test likes."""
    listener, address = listen(kind, LOOPBACK)
    receiver = make_receiver(PlaneAnswer(kind, address, SECRET, DISTRIBUTIONS))
    with closing(Wake()) as wake, ended(receiver), listener:
        terms = PlaneTerms(kind, 1, DISTRIBUTIONS)
        with closing(admit(listener, wake, terms, SECRET, far_off())) as connection:
            yield receiver, connection


@contextmanager
def dialled_by_a_test(kind: PlaneKind) -> Iterator[tuple[Sender, Connection]]:
    """A sender, and the other end of its connection: a target that says what a test likes."""
    sender, answer = make_sender(kind)
    with closing(Wake()) as wake, ended(sender):
        terms = PlaneTerms(kind, 1, DISTRIBUTIONS)
        with closing(enter(place_of(answer), wake, terms, answer.secret, far_off())) as connection:
            yield sender, connection


def place_of(answer: PlaneAnswer) -> tuple[int, str | tuple[str, int]]:
    if answer.kind is PlaneKind.SHARED_MEMORY:
        return socket.AF_UNIX, "\0" + answer.address
    host, port = answer.address.split(":")
    return socket.AF_INET, (host, int(port))


def same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(
        one.view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def expect_break(receiver: Receiver, reason: str) -> None:
    wait_until(lambda: receiver.state is PlaneState.BROKEN)
    with pytest.raises(PlaneBroken, match=reason):
        receiver.receive(RowsKey(1, 1), 1, HANG_SECONDS)
    assert receiver.join(HANG_SECONDS)


def break_off(end: Sender | Receiver, reason: str) -> None:
    """As its own thread does when anything fails."""
    end._advance(PlaneEvent.FAILED, reason)


def is_waited_for(receiver: Receiver, key: RowsKey) -> bool:
    """Whether somebody is within receive(): it lets go of the lock only to wait."""
    with receiver._news:
        return key in receiver._expected


def left_behind(addresses: Collection[str]) -> set[str]:
    """Those of these planes' names that the system still knows, as a socket or as a segment."""
    sockets = re.findall(r"ssd-plane-\S+", Path("/proc/net/unix").read_text())
    return {*sockets, *os.listdir("/dev/shm")} & set(addresses)


class Clock:
    """In place of the module ``time``: a time that passes when a test says so."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def pass_by(self, seconds: float, *ends: Sender | Receiver) -> None:
        """The threads of these ends look at the clock."""
        self._now += seconds
        for end in ends:
            end._wake.ring()

    def pass_until_broken(self, end: Sender | Receiver) -> None:
        """One limit after the other: a thread may begin to wait only now."""

        def broken() -> bool:
            self.pass_by(2 * NO_LIMIT, end)
            return end.state is PlaneState.BROKEN

        wait_until(broken)
