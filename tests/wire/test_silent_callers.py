"""Calls that say nothing, and scrapes that do not end, take nothing from others."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2, target_pb2_grpc
from ssd_serving.calls import request_interceptor as reading
from ssd_serving.calls.health import Health
from ssd_serving.calls.health_server import HealthServer
from ssd_serving.calls.request_interceptor import MAX_UNREAD
from ssd_serving.observability.metrics import ServiceMetrics
from ssd_serving.observability.metrics_server import MAX_SCRAPES
from tests.processes import TargetProcess, collect, target, wait_until_idle
from tests.speculation.generations import OFF, Generations, request, with_speculation
from tests.waiting import HANG_SECONDS, wait_until, wait_until_async
from tests.wire.raw import RawConnection
from tests.wire.test_slow_readers import CUT, DEADLINE_EXCEEDED, LITTLE, begin

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """It does not wait long for those who do not read."""
    flags = ("--health-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    flags += ("--write-timeout", "1", "--max-backlog-kib", "64")
    with target(tmp_path_factory.mktemp("silent"), *flags) as process:
        yield process


Ends = list[asyncio.Future[grpc.StatusCode]]


@asynccontextmanager
async def silent_calls(address: str, method: str, count: int) -> AsyncIterator[Ends]:
    """Calls that never send their request; each has an end, which may never come."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        calls = [channel.stream_unary(method)(timeout=10 * HANG_SECONDS) for _ in range(count)]
        ends = [asyncio.ensure_future(_code(call)) for call in calls]
        yield ends
        for call in calls:
            call.cancel()
        await asyncio.wait(ends)


async def _code(call: grpc.aio.StreamUnaryCall) -> grpc.StatusCode:
    await call.wait_for_connection()
    return await call.code()


def codes(ends: Ends) -> list[grpc.StatusCode]:
    return [end.result() for end in ends if end.done()]


@pytest.mark.parametrize("method", [CHECK, "/ssd.v1.TargetService/Generate"])
def test_calls_that_say_nothing_leave_room_for_others(server: TargetProcess, method: str) -> None:
    """More of them than the server has places for."""
    once = target_pb2.GenerateRequest(text="Once", stop=target_pb2.StopOptions(max_tokens=3))

    async def work() -> None:
        async with silent_calls(server.address, method, 200) as ends:
            await wait_until_async(lambda: len(codes(ends)) >= 200 - MAX_UNREAD)
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes(ends)
            async with grpc.aio.insecure_channel(server.address) as channel:
                if method == CHECK:  # the caller is not the silent one
                    stub = target_pb2_grpc.TargetServiceStub(channel)
                    call = stub.Generate(once, timeout=HANG_SECONDS)
                    assert len([response async for response in call]) >= 2
                else:
                    ask = health_pb2.HealthCheckRequest(service="liveness")
                    check = health_pb2_grpc.HealthStub(channel).Check
                    assert (await check(ask, timeout=HANG_SECONDS)).status == 1

    asyncio.run(work())
    assert len(collect(server.stub().Generate(once, timeout=HANG_SECONDS)).tokens) <= 3


def test_probes_are_answered_beside_calls_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place is left beside them, which another silent one has just given back."""
    monkeypatch.setattr(reading, "OPEN_SECONDS", 10 * HANG_SECONDS)
    probe = health_pb2.HealthCheckRequest(service="liveness")

    async def work() -> None:
        health = Health()
        await health.set("liveness", 1)
        server = HealthServer(health)
        port = server.bind("--health-listen", "127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        async with (
            silent_calls(address, CHECK, MAX_UNREAD - 1) as quiet,
            grpc.aio.insecure_channel(address) as channel,
        ):
            async with silent_calls(address, CHECK, 2) as more:  # one too many
                await wait_until_async(lambda: codes(quiet) + codes(more))
            check = health_pb2_grpc.HealthStub(channel).Check
            statuses: list[int] = []
            while not statuses:
                with contextlib.suppress(grpc.aio.AioRpcError):  # until the places are given back
                    statuses.append((await check(probe, timeout=HANG_SECONDS)).status)
            assert statuses == [1]
            assert len(codes(quiet)) <= 1
        await server.stop()

    asyncio.run(work())


def test_scrapes_that_do_not_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places, each a byte at a time: the next one finds room all the same."""
    monkeypatch.setattr("ssd_serving.observability.metrics_server.SCRAPE_SECONDS", 1.0)
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_SCRAPES)]
    for connection in slow:
        connection.sendall(b"GET")
    answers: list[bytes] = []

    def is_served() -> bool:
        answers.append(_scrape(port))
        return answers[-1].startswith(b"HTTP/1.0 200")

    wait_until(is_served, lambda: answers[-1])
    assert b"ssd_ready" in answers[-1]
    for connection in slow:
        connection.settimeout(HANG_SECONDS)
        assert not _rest(connection)
        connection.close()


def _rest(connection: socket.socket) -> bytes:
    """What is said until the other side ends it."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1)
    return b""


def test_silent_scrapes_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are places, for as long as they like, from another host."""
    monkeypatch.setattr(
        "ssd_serving.observability.metrics_server.SCRAPE_SECONDS", 10 * HANG_SECONDS
    )
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0)
    with contextlib.ExitStack() as silent:
        for _ in range(3 * MAX_SCRAPES):
            connection = socket.create_connection(
                ("127.0.0.1", port), HANG_SECONDS, source_address=("127.0.0.9", 0)
            )
            silent.enter_context(connection)
        for _ in range(5):
            wait_until(lambda: _scrape(port).startswith(b"HTTP/1.0 200"))


def _scrape(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(65_536), b""))
    except OSError as error:
        return str(error).encode()


def test_a_scrape_over_tls_that_is_none_harms_nobody(tmp_path: Path) -> None:
    from ssd_serving.security.tls import TlsFiles
    from tests.security.certificates import Authority

    cert, key = Authority("authority").sign("metrics").write(tmp_path, "metrics")
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0, TlsFiles(cert, key, None))
    assert not _scrape(port).startswith(b"HTTP")  # in the clear: no answer


def test_clients_that_never_read_lose_their_place_and_others_go_on(server: TargetProcess) -> None:
    """Half of them break the bound in time; the others that or the one in bytes."""
    others = [with_speculation(request(seed, 60), mode=OFF) for seed in range(2)]
    with Generations(server, others) as alone:
        pass
    before = server.metrics()
    silent = with_speculation(request(11, 100), mode=OFF)
    wordy = with_speculation(request(12, 600), mode=OFF)
    wordy.logprobs.top_n = 20
    with RawConnection(server.address, LITTLE) as client:
        with Generations(server, others) as running:
            stalled = [begin(client, message) for message in (silent, silent, wordy, wordy)]
            wait_until(lambda: cuts(server) - sum_of_cuts(before) == 4)
            wait_until_idle(server)
        assert running.texts() == alone.texts()
        client.listen(0.1)
        assert not any(stream.ended for stream in stalled)
        # A status is there for those who come back to read.
        for stream in stalled:
            client.grant(stream, 2**20)
            code, text = client.until_ended(stream).status
            assert code == DEADLINE_EXCEEDED
            assert "--write-timeout" in text or "--max-backlog-kib" in text
    after = server.metrics()
    assert after[CUT("write_timeout")] - before[CUT("write_timeout")] >= 2
    assert "Traceback" not in server.log()


def cuts(server: TargetProcess) -> float:
    return sum_of_cuts(server.metrics())


def sum_of_cuts(metrics: dict[str, float]) -> float:
    return sum(metrics[CUT(bound)] for bound in ("write_timeout", "backlog"))
