"""Idle connections make room for newcomers: nobody can lock the others out by holding them."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_gateway.http import connections
from ssd_gateway.http.connections import Connections, most_connections
from tests.gateway.scripted_model import ScriptedModel, serving
from tests.processes import GatewayProcess, gateway
from tests.waiting import HANG_SECONDS, wait_until

MOST = 8


@dataclass(eq=False)
class Peer:
    host: str
    name: str = ""
    aborted: list[str] = field(default_factory=list)

    def abort(self) -> None:
        self.aborted.append(self.name)


def test_the_oldest_that_waits_of_the_host_with_most_makes_room() -> None:
    gone: list[str] = []
    reasons: list[str] = []
    peers = Connections(4, reasons.append)
    one, two, three = (Peer("a", name, gone) for name in ("a1", "a2", "a3"))
    other = Peer("b", "b1", gone)
    for each in (other, one, two, three):
        assert peers.add(each)
    peers.works(one)
    peers.works(two)
    peers.waits(two)  # it has answered: it is the youngest that waits
    assert peers.add(Peer("c", "c1", gone))
    assert gone == ["a3"]
    assert peers.add(Peer("c", "c2", gone))
    assert gone == ["a3", "a2"]
    assert reasons == ["idle", "idle"]
    peers.remove(three)  # its connection is lost: that is no other one's room
    peers.remove(two)
    assert peers.add(Peer("d", "d1", gone))
    assert gone == ["a3", "a2", "c1"]


def test_what_works_makes_no_room() -> None:
    gone: list[str] = []
    reasons: list[str] = []
    peers = Connections(1, reasons.append)
    one = Peer("a", "a1", gone)
    assert peers.add(one)
    peers.works(one)
    assert not peers.add(Peer("b", "b1", gone))
    assert (gone, reasons) == (["b1"], ["full"])
    peers.remove(one)
    peers.works(one)  # it is gone: that changes nothing
    peers.waits(one)
    assert peers.add(Peer("b", "b2", gone))


def test_there_are_as_many_as_there_are_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (20_000, 4096), (-1, 4096), (100, 16)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections(4096) == most


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder: Path = tmp_path_factory.mktemp("crowded")
    flags = ("--max-connections", str(MOST))
    model = ScriptedModel(pb.ChatFormat(), lambda _: "Once")
    with serving(model), gateway(folder, *flags, targets=[model.address]) as process:
        yield process


def test_a_request_that_is_coming_is_no_idle_connection(front: GatewayProcess) -> None:
    with ExitStack() as stack:

        def asked() -> socket.socket:
            made = stack.enter_context(connect(front, "127.0.0.2"))
            made.sendall(ASK)
            assert b"200" in made.recv(1024)
            return made

        oldest, next_one = asked(), asked()
        next_one.setblocking(False)
        oldest.sendall(UPLOAD)
        assert b"100 Continue" in oldest.recv(1024)
        while is_open(next_one):
            asked()
        oldest.sendall(b"{}")
        assert b"400 Bad Request" in oldest.recv(1024)


def is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def connect(front: GatewayProcess, host: str) -> socket.socket:
    name, _, port = front.address.rpartition(":")
    return socket.create_connection((name, int(port)), HANG_SECONDS, (host, 0))


def get(front: GatewayProcess, path: str) -> tuple[int, str]:
    host, _, port = front.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


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
        assert [get(front, "/health")[0] for _ in range(5)] == 5 * [200]
        mine.sendall(ASK)  # who holds few keeps them
        assert b"200" in mine.recv(1024)
    wait_until(
        lambda: 'ssd_gateway_connections_dropped_total{reason="idle"}' in get(front, "/metrics")[1],
        front.log,
    )
    assert "made room" in front.log()
