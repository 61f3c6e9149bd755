"""Callers that say nothing, or read slowly, or not at all, hold nobody up and no memory."""

import asyncio
import contextlib
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2_grpc

from ssd.v1 import speculation_pb2 as pb_speculation
from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc
from ssd_engine.sampling.params import Logprobs
from ssd_serving.calls import request_interceptor as reading
from ssd_serving.calls.request_interceptor import MAX_UNREAD
from ssd_serving.engine.records import encode
from ssd_serving.observability.metrics import ServiceMetrics
from ssd_serving.observability.metrics_server import MAX_SCRAPES
from ssd_target.front.backlog import Backlog
from ssd_target.records.engine_records import Delta
from tests.processes import TargetProcess, collect, target, wait_until_idle
from tests.speculation.generations import (
    METRICS,
    OFF,
    Generations,
    Pair,
    draft_info,
    generate,
    is_empty,
    request,
    with_speculation,
)
from tests.waiting import HANG_SECONDS, wait_until, wait_until_async
from tests.wire.raw import RawConnection, RawStream, framed, headers
from tests.wire.rpcs import frames, hello, rounds
from tests.wire.test_health import UP, in_a_loop, of, served

GENERATE = "/ssd.v1.TargetService/Generate"
SPECULATE = "/ssd.v1.SpeculationService/Speculate"
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
LITTLE = 200  # bytes that a stalled client grants: not even the first tokens
STEPS = "ssd_engine_steps_total"
CUT = 'ssd_streams_cut_total{{bound="{}"}}'.format


def begin(client: RawConnection, message: pb.GenerateRequest) -> RawStream:
    return client.call(headers(GENERATE), framed(message.SerializeToString()))


def text_of(stream: RawStream) -> str:
    return "".join(pb.GenerateResponse.FromString(m).tokens.text for m in stream.messages())


def test_a_client_that_reads_slowly_gets_all_in_larger_pieces_and_the_engine_does_not_wait(
    victims: Pair,
) -> None:
    tokens = 50
    message = with_speculation(request(14, tokens), mode=OFF)
    message.logprobs.top_n = 5
    [(text, _)] = victims.plain.of([message])
    before = victims.target.metrics()[STEPS]
    with RawConnection(victims.target.address, LITTLE) as client:
        stream = begin(client, message)
        wait_until(lambda: victims.target.metrics()[STEPS] - before >= tokens)
        wait_until_idle(victims.target)
        client.listen(0.1)
        assert not stream.ended
        while not stream.ended:
            client.grant(stream, 500)
            client.listen(0.05)
    assert stream.status[0] == 0
    assert text_of(stream) == text
    assert len(stream.messages()) < tokens


def test_a_target_that_never_reads_loses_its_link_and_what_it_holds(victims: Pair) -> None:
    process = victims.draft.process
    stalled = 'ssd_draft_links_ended_total{how="stalled"}'
    before = process.metrics().get(stalled, 0)
    opened = pb_speculation.SpeculateRequest.FromString(rounds()[0]).frames.frames[0]
    several = [pb_speculation.TargetFrame(sequence=i, open=opened.open) for i in range(8)]
    said = framed(hello(draft_info(process))) + framed(frames(*several))
    with RawConnection(process.address, LITTLE) as client:
        stream = client.call(headers(SPECULATE), said, end=False)
        wait_until(lambda: process.metrics()["ssd_sequences_active"] >= 8)
        wait_until(lambda: process.metrics().get(stalled, 0) > before)
        wait_until(lambda: is_empty(process))
        client.grant(stream, 2**20)
        code, text = client.until_ended(stream).status
    assert code == DEADLINE_EXCEEDED
    assert "--link-write-timeout" in text


@pytest.mark.parametrize("top", [None, 0, 20])
def test_the_size_of_a_backlog_is_about_that_of_its_memory(top: int | None) -> None:
    best = tuple((3000 + i, -i / 7) for i in range(top or 0))
    logprobs = None if top is None else [Logprobs(-1.5, best)]
    data = [encode(Delta(7, [1000 + i], logprobs, 0, False)) for i in range(500)]
    backlog = Backlog()
    tracemalloc.start()
    try:
        for each in data:
            backlog.put_nowait(msgspec.msgpack.decode(each, type=Delta))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.4 < used / backlog.size < 1.2


# Callers that say nothing.

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """It does not wait long for those who do not read."""
    flags = (
        *METRICS,
        "--health-listen",
        "127.0.0.1:0",
        "--write-timeout",
        "1",
        "--max-backlog-kib",
        "64",
    )
    with target(tmp_path_factory.mktemp("silent"), *flags) as process:
        yield process


Ends = list[asyncio.Future[grpc.StatusCode]]


@asynccontextmanager
async def silent_calls(address: str, count: int, method: str = CHECK) -> AsyncIterator[Ends]:
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
@in_a_loop
async def test_calls_that_say_nothing_leave_room_for_others(
    server: TargetProcess, method: str
) -> None:
    """More of them than the server has places for."""
    once = pb.GenerateRequest(text="Once", stop=pb.StopOptions(max_tokens=3))
    async with silent_calls(server.address, 200, method) as ends:
        await wait_until_async(lambda: len(codes(ends)) >= 200 - MAX_UNREAD)
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes(ends)
        async with grpc.aio.insecure_channel(server.address) as channel:
            if method == CHECK:  # the caller is not the silent one
                stub = target_pb2_grpc.TargetServiceStub(channel)
                call = stub.Generate(once, timeout=HANG_SECONDS)
                assert len([response async for response in call]) >= 2
            else:
                check = health_pb2_grpc.HealthStub(channel).Check
                assert (await check(of("liveness"), timeout=HANG_SECONDS)).status == UP
    assert len(collect(server.stub().Generate(once, timeout=HANG_SECONDS)).tokens) <= 3


@in_a_loop
async def test_probes_are_answered_beside_calls_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One place is left beside them, which another silent one has just given back."""
    monkeypatch.setattr(reading, "OPEN_SECONDS", 10 * HANG_SECONDS)
    async with served() as (_, stub, address), silent_calls(address, MAX_UNREAD - 1) as quiet:
        async with silent_calls(address, 2) as more:  # one too many
            await wait_until_async(lambda: codes(quiet) + codes(more))
        statuses: list[int] = []
        while not statuses:
            with contextlib.suppress(grpc.aio.AioRpcError):  # until the places are given back
                statuses.append((await stub.Check(of("x"), timeout=HANG_SECONDS)).status)
        assert statuses == [UP]
        assert len(codes(quiet)) <= 1


def test_scrapes_that_do_not_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places, each a byte at a time: the next one finds room all the same."""
    monkeypatch.setattr("ssd_serving.observability.metrics_server.SCRAPE_SECONDS", 1.0)
    port = ServiceMetrics("target", lambda: None).listen("127.0.0.1", 0)
    slow = [socket.create_connection(("127.0.0.1", port), HANG_SECONDS) for _ in range(MAX_SCRAPES)]
    for connection in slow:
        connection.sendall(b"GET")
    wait_until(lambda: _scrape(port).startswith(b"HTTP/1.0 200"))
    for connection in slow:
        with contextlib.suppress(ConnectionResetError):
            assert not connection.recv(1)
        connection.close()


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


def test_clients_that_never_read_lose_their_place_and_others_go_on(server: TargetProcess) -> None:
    """Half of them break the bound in time; the others that or the one in bytes."""
    others = [with_speculation(request(seed, 60), mode=OFF) for seed in range(2)]
    alone = [generate(server, message).tokens for message in others]
    silent = with_speculation(request(11, 100), mode=OFF)
    wordy = with_speculation(request(12, 600), mode=OFF)
    wordy.logprobs.top_n = 20

    def cuts(*bounds: str) -> float:
        return sum(server.metrics()[CUT(bound)] for bound in bounds)

    with RawConnection(server.address, LITTLE) as client:
        with Generations(server, others) as running:
            stalled = [begin(client, message) for message in (silent, silent, wordy, wordy)]
            wait_until(lambda: cuts("write_timeout", "backlog") == 4)
            wait_until_idle(server)
        assert [tokens for _, tokens in running.texts()] == alone
        client.listen(0.1)
        assert not any(stream.ended for stream in stalled)
        # A status is there for those who come back to read.
        for stream in stalled:
            client.grant(stream, 2**20)
            code, text = client.until_ended(stream).status
            assert code == DEADLINE_EXCEEDED
            assert "--write-timeout" in text or "64 KiB of tokens behind (--max-backlog-kib" in text
    assert cuts("write_timeout") >= 2
    assert "Traceback" not in server.log()
