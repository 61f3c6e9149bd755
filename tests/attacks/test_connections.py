"""Connections and calls that say nothing, from callers who need no token for that."""

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd_serving.rpc import connections
from tests.attacks.conftest import OTHER, TOKEN_FILE, Attacked, generate, request
from tests.processes import SERVING, target
from tests.waiting import HANG_SECONDS, wait_until

DESCRIPTORS = 400
SILENT = 70
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)  # and no settings


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """It may have few descriptors, as in a container."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "tokens.toml").write_text(TOKEN_FILE)
    (folder / "tokens.toml").chmod(0o600)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    flags = ["--token-file", str(folder / "tokens.toml"), "--health-listen", "127.0.0.1:0"]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "executable", str(python))
        process = stack.enter_context(target(folder, *flags))
        patch.undo()
        yield Attacked(folder, process)


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
                connection = socket.create_connection(
                    (host, int(port)), HANG_SECONDS, source_address=("127.0.0.9", 0)
                )
                stack.enter_context(connection)
                connection.sendall(hello)
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


def test_probes_get_through_beside_connections_that_say_nothing(small: Attacked) -> None:
    """They come from another host, and stay; some have said hello."""
    address = health_address(small)
    with idle_connections(address, 200, hello=PREFACE), idle_connections(address, 1050):
        assert [is_alive(address) for _ in range(24)] == 24 * [True]
    with idle_connections(address, 1050), idle_connections(address, 200, hello=PREFACE):
        assert [is_alive(address) for _ in range(24)] == 24 * [True]


def is_served(address: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return is_alive(address)
    return False


@contextlib.contextmanager
def silent_checks(address: str, number: int) -> Iterator[None]:
    """Calls that never send their request."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait(HANG_SECONDS)
        yield from ()

    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = channel.stream_stream("/grpc.health.v1.Health/Check")
        calls = [check(nothing()) for _ in range(number)]
        try:
            yield
        finally:
            end.set()
            for call in calls:
                call.cancel()


@pytest.mark.parametrize("port", ["calls", "health"])
def test_probes_get_through_beside_calls_that_say_nothing(small: Attacked, port: str) -> None:
    address = small.target.address if port == "calls" else health_address(small)
    with silent_checks(address, SILENT):
        assert [is_alive(address) for _ in range(24)] == 24 * [True]


def test_a_port_knows_as_many_connections_as_there_are_descriptors_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for soft, most in ((400, 204), (1024, 672), (1_000_000, 3072), (-1, 4096), (100, 16)):
            patch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
            assert connections.most_connections() == most
