"""Idle connections of the host that has most make room for others."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ssd_serving.calls import connection_room
from ssd_serving.calls.connection_room import ConnectionRoom, HeldConnection, to_close
from tests.waiting import wait_until


def held(host: str, *idle: float) -> list[HeldConnection]:
    return [HeldConnection(i, (host, i), seconds) for i, seconds in enumerate(idle)]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2, [("hog", 9), ("hog", 8)]),
        (3, [("hog", 9), ("hog", 8), ("hog", 7)]),
        # Those of the last second have just come, or are in use.
        (9, [("hog", 9), ("hog", 8), ("hog", 7), ("other", 60)]),
    ],
)
def test_the_idlest_of_the_host_that_has_most_go(
    number: int, expected: list[tuple[str, float]]
) -> None:
    connections = held("hog", 7, 0.1, 9, 0.2, 8) + held("other", 60)
    assert [(each.peer[0], each.idle) for each in to_close(connections, number)] == expected


@contextlib.contextmanager
def connected(port: int, host: str, number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), None, (host, 0)))
            for _ in range(number)
        ]


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1) == b""
    return False


def test_connections_of_a_port_are_found_and_shut_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_room, "IDLE_SECONDS", 0.0)
    closed: list[int] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        port = listener.getsockname()[1]
        hogs = stack.enter_context(connected(port, "127.0.0.2", 14))
        (other,) = stack.enter_context(connected(port, "127.0.0.1", 1))
        for _ in range(15):
            stack.enter_context(listener.accept()[0])
        ConnectionRoom(port, 64, closed.append).make_room()
        assert not closed
        with open(os.devnull) as no_socket:
            before = len(os.listdir("/proc/self/fd"))
            ConnectionRoom(port, 16, closed.append).make_room()
            assert closed == [3]
            assert len(os.listdir("/proc/self/fd")) == before, no_socket
        wait_until(lambda: sum(map(has_ended, hogs)) == 3)
        assert not has_ended(other)
        assert "3 idle connections of 127.0.0.2 made room for others" in caplog.text
