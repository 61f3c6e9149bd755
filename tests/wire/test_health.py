"""Watchers of a service's health hear of changes, whatever other watchers do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as rpc

from ssd_serving.calls.health import MAX_WATCHERS, Health
from ssd_serving.calls.health_server import HealthServer
from ssd_serving.rpc.connections import MAX_CHECK_BYTES
from tests.waiting import HANG_SECONDS, wait_until_async
from tests.wire.raw import RawConnection, framed, headers

UP, DOWN = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Health, rpc.HealthStub, str]]:
    """Health of x, which is up, on a port for probes."""
    health = Health()
    await health.set("x", UP)
    server = HealthServer(health)
    address = f"127.0.0.1:{server.bind('--health-listen', '127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield health, rpc.HealthStub(channel), address
    await server.stop()


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that awaits."""

    @wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))  # type: ignore[arg-type]

    return run


def of(service: str) -> pb.HealthCheckRequest:
    return pb.HealthCheckRequest(service=service)


async def code(call: Awaitable[object]) -> grpc.StatusCode:
    """Why it is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found: grpc.StatusCode = caught.value.code()
    return found


@in_a_loop
async def test_a_watcher_that_leaves_takes_nobody_with_it() -> None:
    async with served() as (health, stub, _):
        stays, leaves, waits = (
            stub.Watch(of(name), timeout=HANG_SECONDS) for name in ("x", "x", "y")
        )
        for call, status in ((stays, UP), (leaves, UP), (waits, UNKNOWN)):
            assert (await call.read()).status == status
        leaves.cancel()
        await wait_until_async(lambda: health._watchers == 2)
        await health.set("x", DOWN)
        await health.set("y", UP)
        assert [(await call.read()).status for call in (stays, waits)] == [DOWN, UP]
        assert (await stub.Check(of("x"))).status == DOWN
        assert await code(stub.Check(of("z"))) == grpc.StatusCode.NOT_FOUND


@in_a_loop
async def test_a_check_on_a_port_for_probes_is_small_and_plain() -> None:
    """Whoever reaches the port may ask, and needs no token: so no megabytes are taken for it."""
    large, packed = of("x" * (MAX_CHECK_BYTES + 1)), grpc.Compression.Gzip
    async with served() as (_, stub, _):
        assert (await stub.Check(of("x"))).status == UP
        assert await code(stub.Check(large)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for message in (large, of("x")):
            refused = await code(stub.Check(message, compression=packed))
            assert refused is grpc.StatusCode.UNIMPLEMENTED


@in_a_loop
async def test_watchers_cannot_take_all_calls() -> None:
    async with served() as (health, stub, _):
        watching = [stub.Watch(of("y"), timeout=HANG_SECONDS) for _ in range(MAX_WATCHERS)]
        for call in watching:
            await call.read()
        refused = await code(stub.Watch(of("y"), timeout=HANG_SECONDS).read())
        assert refused == grpc.StatusCode.RESOURCE_EXHAUSTED
        watching[0].cancel()
        await wait_until_async(lambda: health._watchers < MAX_WATCHERS)
        again = stub.Watch(of("y"), timeout=HANG_SECONDS)
        assert (await again.read()).status == UNKNOWN


@in_a_loop
async def test_a_path_that_is_no_text_does_not_end_the_server() -> None:
    """grpcio 1.84 and 1.85 decode paths in the loop that takes all calls: one call of a stranger
    would end it."""

    def attack(address: str) -> None:
        with RawConnection(address) as client:
            path = b"/grpc.health.v1.Health/\xff"
            client.until_ended(client.call(headers(path), framed(b"")))  # type: ignore[arg-type]

    async with served() as (_, stub, address):
        await asyncio.to_thread(attack, address)
        assert (await stub.Check(of("x"))).status == UP
