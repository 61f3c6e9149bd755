"""Calls that say nothing, and scrapes that do not end, take nothing from others."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2
from ssd_engine.serving.health import Health
from ssd_engine.serving.health_server import bound, make_health_server
from ssd_engine.serving.metrics import ServiceMetrics
from ssd_engine.serving.metrics_server import MAX_SCRAPES
from ssd_engine.serving.reading import MAX_UNREAD
from tests.processes import TargetProcess, collect, target

SECONDS = 60
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    flags = ("--health-listen", "127.0.0.1:0", "--max-num-seqs", "4", "--max-waiting", "4")
    with target(tmp_path_factory.mktemp("silent"), *flags) as process:
        yield process


async def silent_calls(address: str, method: str, count: int) -> list[grpc.StatusCode | None]:
    """How so many calls that never send their request have ended soon; None: they have not."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        calls = [channel.stream_unary(method)(timeout=SECONDS) for _ in range(count)]
        ends = [asyncio.ensure_future(_code(call)) for call in calls]
        await asyncio.wait(ends, timeout=2.0)
        found = [end.result() if end.done() else None for end in ends]
        for call in calls:
            call.cancel()
        await asyncio.wait(ends)
    return found


async def _code(call: grpc.aio.StreamUnaryCall) -> grpc.StatusCode:
    await call.wait_for_connection()
    return await call.code()


@pytest.mark.parametrize("method", [CHECK, "/ssd.v1.TargetService/Generate"])
def test_calls_that_say_nothing_leave_room_for_others(server: TargetProcess, method: str) -> None:
    """More of them than the server has places for."""

    async def work() -> tuple[list[grpc.StatusCode | None], target_pb2.GetModelInfoResponse]:
        quiet = asyncio.create_task(silent_calls(server.address, method, 200))
        await asyncio.sleep(1.0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            generate = channel.unary_stream(
                "/ssd.v1.TargetService/Generate",
                request_serializer=target_pb2.GenerateRequest.SerializeToString,
                response_deserializer=target_pb2.GenerateResponse.FromString,
            )
            stop = target_pb2.StopOptions(max_tokens=3)
            call = generate(target_pb2.GenerateRequest(text="Once", stop=stop), timeout=SECONDS)
            if method == CHECK:  # the caller is not the silent one
                assert len([response async for response in call]) >= 2
            else:
                call.cancel()
            check = health_pb2_grpc.HealthStub(channel).Check
            if method != CHECK:
                answer = await check(
                    health_pb2.HealthCheckRequest(service="liveness"), timeout=SECONDS
                )
                assert answer.status == 1
        return await quiet

    ends = asyncio.run(work())
    assert ends.count(None) <= MAX_UNREAD
    refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ends.count(refused) >= 200 - MAX_UNREAD
    after = target_pb2.GenerateRequest(text="Once", stop=target_pb2.StopOptions(max_tokens=3))
    assert len(collect(server.stub().Generate(after, timeout=SECONDS)).tokens) <= 3


def test_probes_are_answered_beside_calls_that_say_nothing() -> None:
    async def work() -> None:
        health = Health()
        await health.set("liveness", 1)
        server = make_health_server(health)
        port = bound("--health-listen", "127.0.0.1:0", server.add_insecure_port)
        await server.start()
        quiet = asyncio.create_task(silent_calls(f"127.0.0.1:{port}", CHECK, MAX_UNREAD - 1))
        await asyncio.sleep(0.5)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = health_pb2.HealthCheckRequest(service="liveness")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)
        assert answer.status == 1
        assert (await quiet).count(None) == MAX_UNREAD - 1
        await server.stop(None)

    asyncio.run(work())


def test_scrapes_that_do_not_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places, each a byte at a time: the next one finds room all the same."""
    monkeypatch.setattr("ssd_engine.serving.metrics_server.SCRAPE_SECONDS", 1.0)
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_SCRAPES)]
    for connection in slow:
        connection.sendall(b"GET")
    deadline = time.monotonic() + SECONDS
    while not (answer := _scrape(port)).startswith(b"HTTP/1.0 200"):
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    assert b"ssd_ready" in answer
    for connection in slow:
        connection.close()


def _scrape(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(65_536), b""))
    except OSError as error:
        return str(error).encode()


def test_a_scrape_over_tls_that_is_none_harms_nobody(tmp_path: Path) -> None:
    from ssd_engine.serving.tls import TlsFiles
    from tests.security.certificates import Authority

    cert, key = Authority("authority").sign("metrics").write(tmp_path, "metrics")
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0, TlsFiles(cert, key, None))
    assert not _scrape(port).startswith(b"HTTP")  # in the clear: no answer
