"""Idle connections make room for newcomers: nobody can lock the others out by holding them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from ssd_gateway.http import connections
from ssd_gateway.http.connections import Connections, most_connections
from tests.client.scripted_target import serve
from tests.gateway.callers import ask, connect
from tests.processes import GatewayProcess, gateway
from tests.waiting import wait_until

MOST = 8


@dataclass(eq=False)
class Peer:
    host: str
    name: str
    aborted: list[str]

    def abort(self) -> None:
        self.aborted.append(self.name)


class Crowd:
    """Connections by their names, whose first letters are their hosts."""

    def __init__(self, most: int) -> None:
        self.gone, self.reasons = list[str](), list[str]()
        self.all = Connections(most, self.reasons.append)
        self.peers: dict[str, Peer] = {}

    def add(self, *names: str) -> list[bool]:
        self.peers |= {name: Peer(name[0], name, self.gone) for name in names}
        return [self.all.add(self.peers[name]) for name in names]


def test_the_oldest_that_waits_of_the_host_with_most_makes_room() -> None:
    crowd = Crowd(4)
    assert crowd.add("b1", "a1", "a2", "a3") == [True] * 4
    for name in ("a1", "a2"):
        crowd.all.works(crowd.peers[name])
    crowd.all.waits(crowd.peers["a2"])  # it has answered: it is the youngest that waits
    assert crowd.add("c1", "c2") == [True] * 2
    assert (crowd.gone, crowd.reasons) == (["a3", "a2"], ["idle", "idle"])
    for name in ("a3", "a2"):  # their connections are lost: that is no other one's room
        crowd.all.remove(crowd.peers[name])
    assert crowd.add("d1") == [True]
    assert crowd.gone == ["a3", "a2", "c1"]


def test_what_works_makes_no_room() -> None:
    crowd = Crowd(1)
    assert crowd.add("a1") == [True]
    crowd.all.works(crowd.peers["a1"])
    assert crowd.add("b1") == [False]
    assert (crowd.gone, crowd.reasons) == (["b1"], ["full"])
    for change in (crowd.all.remove, crowd.all.works, crowd.all.waits):  # once gone, no other
        change(crowd.peers["a1"])
    assert crowd.add("b2") == [True]


def test_there_are_as_many_as_there_are_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (20_000, 4096), (-1, 4096), (100, 16)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections(4096) == most


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder, flags = tmp_path_factory.mktemp("crowded"), ("--max-connections", str(MOST))
    with serve() as model, gateway(folder, *flags, targets=[model.address]) as process:
        yield process


def test_a_request_that_is_coming_is_no_idle_connection(front: GatewayProcess) -> None:
    with ExitStack() as stack:

        def served() -> socket.socket:
            made = stack.enter_context(connect(front, "127.0.0.2"))
            made.sendall(ASK)
            assert b"200" in made.recv(1024)
            return made

        oldest, next_one = served(), served()
        next_one.setblocking(False)
        oldest.sendall(UPLOAD)
        assert b"100 Continue" in oldest.recv(1024)
        while is_open(next_one):
            served()
        oldest.sendall(b"{}")
        assert b"400 Bad Request" in oldest.recv(1024)


def is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


ASK = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
UPLOAD = (
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\n"
    b"content-type: application/json\r\ncontent-length: 2\r\n\r\n"
)
BEGINNINGS = {
    "nothing": b"",
    "a request": ASK,
    "half of a head": ASK[:20],
    "half of a body": b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_probes_get_through_beside_connections_that_sent(
    front: GatewayProcess, beginning: str
) -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(connect(front, "127.0.0.1"))
        mine.sendall(ASK)
        assert b"200" in mine.recv(1024)
        for _ in range(3 * MOST):
            held = stack.enter_context(connect(front, "127.0.0.2"))
            with suppress(ConnectionError):
                held.sendall(BEGINNINGS[beginning])
        assert [ask(front, "/health").status for _ in range(5)] == 5 * [200]
        mine.sendall(ASK)  # who holds few keeps them
        assert b"200" in mine.recv(1024)
    dropped = b'ssd_gateway_connections_dropped_total{reason="idle"}'
    wait_until(lambda: dropped in ask(front, "/metrics").read(), front.log)
    assert "made room" in front.log()
