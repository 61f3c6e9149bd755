"""Connections that say nothing, from callers who need no token for that."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd_serving.rpc import connections
from tests.attacks.conftest import OTHER, Attacked, generate, request, started
from tests.processes import SERVING
from tests.waiting import HANG_SECONDS, wait_until

DESCRIPTORS = 400
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # and no settings


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """It may have few descriptors, as in a container."""
    folder = tmp_path_factory.mktemp("small")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "executable", str(python))
        attacked = stack.enter_context(started(folder, "--health-listen", "127.0.0.1:0"))
        patch.undo()
        yield attacked


def health_address(attacked: Attacked) -> str:
    found = re.search(r"health on (\S+)", attacked.target.log())
    assert found
    return found[1]


def is_alive(address: str) -> bool:
    """As a probe asks: on a connection of its own."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = health_pb2.HealthCheckRequest(service="liveness")
        answer = health_pb2_grpc.HealthStub(channel).Check(check, timeout=HANG_SECONDS)
    return bool(answer.status == SERVING)


@contextlib.contextmanager
def idle_connections(address: str, number: int, hello: bytes = b"") -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            with contextlib.suppress(OSError):  # it may be hung up at once
                source = ("127.0.0.9", 0)
                connection = socket.create_connection((host, int(port)), HANG_SECONDS, source)
                stack.enter_context(connection).sendall(hello)
        yield


def test_idle_connections_leave_descriptors_and_the_other_port_free(small: Attacked) -> None:
    front = small.target.process.pid
    with small.target.channel() as channel:
        expected = generate(channel, OTHER, request())
        with idle_connections(small.target.address, 1050, hello=PREFACE):
            assert len(os.listdir(f"/proc/{front}/fd")) < DESCRIPTORS - 50
            assert is_alive(health_address(small))
            assert generate(channel, OTHER, request()) == expected
            wait_until(lambda: is_served(small.target.address), "the idle ones are left")
            assert "idle connections of 127.0.0.9 made room for others" in small.target.log()
        with idle_connections(health_address(small), 1050):
            assert len(os.listdir(f"/proc/{front}/fd")) < DESCRIPTORS - 50
            assert is_alive(small.target.address)
            assert generate(channel, OTHER, request()) == expected


@pytest.mark.parametrize("kinds", [((200, PREFACE), (1050, b"")), ((1050, b""), (200, PREFACE))])
def test_probes_get_through_beside_connections_that_say_nothing(
    small: Attacked, kinds: tuple[tuple[int, bytes], ...]
) -> None:
    """They come from another host, and stay; some have said hello."""
    address = health_address(small)
    with contextlib.ExitStack() as stack:
        for number, hello in kinds:
            stack.enter_context(idle_connections(address, number, hello))
        assert all(is_alive(address) for _ in range(24))


def is_served(address: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return is_alive(address)
    return False


@pytest.mark.parametrize(
    ("soft", "most"), [(400, 204), (1024, 672), (1_000_000, 3072), (-1, 4096), (100, 16)]
)
def test_a_port_knows_as_many_connections_as_there_are_descriptors_for(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, soft))
    assert connections.most_connections() == most
