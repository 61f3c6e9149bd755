"""Watchers of a service's health hear of changes, whatever other watchers do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as rpc

from ssd_serving.calls.health import MAX_WATCHERS, Health
from ssd_serving.calls.health_server import HealthServer
from ssd_serving.calls.request_interceptor import ReadRequests
from ssd_serving.rpc.connections import MAX_CHECK_BYTES
from tests.waiting import HANG_SECONDS, wait_until_async
from tests.wire.raw import RawConnection, framed, headers

UP, DOWN = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Health, rpc.HealthStub]]:
    health, server = Health(), grpc.aio.server(interceptors=(ReadRequests(),))
    rpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield health, rpc.HealthStub(channel)
    finally:
        await server.stop(None)


def test_a_watcher_that_leaves_takes_nobody_with_it() -> None:
    async def work() -> None:
        async with served() as (health, stub):
            await health.set("x", UP)
            stays, leaves, waits = (
                stub.Watch(pb.HealthCheckRequest(service=name), timeout=HANG_SECONDS)
                for name in ("x", "x", "y")
            )
            for call, status in ((stays, UP), (leaves, UP), (waits, UNKNOWN)):
                assert (await call.read()).status == status
            leaves.cancel()
            await wait_until_async(lambda: health._watchers == 2)
            await health.set("x", DOWN)
            assert (await stays.read()).status == DOWN
            await health.set("y", UP)
            assert (await waits.read()).status == UP
            assert (await stub.Check(pb.HealthCheckRequest(service="x"))).status == DOWN
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(pb.HealthCheckRequest(service="z"))
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND

    asyncio.run(work())


def test_a_check_on_a_port_for_probes_is_small_and_plain() -> None:
    """Whoever reaches the port may ask, and needs no token: so no megabytes are taken for it."""

    async def work() -> None:
        health = Health()
        await health.set("x", UP)
        server = HealthServer(health)
        port = server.bind("--health-listen", "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = rpc.HealthStub(channel)
            assert (await stub.Check(pb.HealthCheckRequest(service="x"))).status == UP
            large = pb.HealthCheckRequest(service="x" * (MAX_CHECK_BYTES + 1))
            packed = grpc.Compression.Gzip
            for message, compression, code in (
                (large, None, grpc.StatusCode.RESOURCE_EXHAUSTED),
                (large, packed, grpc.StatusCode.UNIMPLEMENTED),
                (pb.HealthCheckRequest(service="x"), packed, grpc.StatusCode.UNIMPLEMENTED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Check(message, timeout=HANG_SECONDS, compression=compression)
                assert caught.value.code() is code
        await server.stop()

    asyncio.run(work())


def test_watchers_cannot_take_all_calls() -> None:
    async def work() -> None:
        async with served() as (health, stub):
            request = pb.HealthCheckRequest()
            watching = [stub.Watch(request, timeout=HANG_SECONDS) for _ in range(MAX_WATCHERS)]
            for call in watching:
                await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Watch(request, timeout=HANG_SECONDS).read()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            watching[0].cancel()
            await wait_until_async(lambda: health._watchers < MAX_WATCHERS)
            assert (await stub.Watch(request, timeout=HANG_SECONDS).read()).status == UNKNOWN

    asyncio.run(work())


def test_a_path_that_is_no_text_does_not_end_the_server() -> None:
    """grpcio 1.84 and 1.85 decode paths in the loop that takes all calls: one call of a stranger
    would end it."""

    async def work() -> None:
        health = Health()
        await health.set("x", UP)
        server = HealthServer(health)
        port = server.bind("--health-listen", "127.0.0.1:0")
        await server.start()

        def attack() -> None:
            with RawConnection(f"127.0.0.1:{port}") as client:
                path = b"/grpc.health.v1.Health/\xff"
                client.until_ended(client.call(headers(path), framed(b"")))  # type: ignore[arg-type]

        await asyncio.to_thread(attack)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = pb.HealthCheckRequest(service="x")
            assert (await rpc.HealthStub(channel).Check(request)).status == UP
        await server.stop()

    asyncio.run(work())
