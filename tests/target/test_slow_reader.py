"""A client that never reads loses its place: the service's own writes on a real connection."""

import asyncio
import time

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.errors import SSDError
from ssd_engine.serving.access import Access
from ssd_engine.serving.allowances import Accounts, Allowance
from ssd_engine.serving.status import ReaderStalled, abort
from ssd_target.links import Links
from ssd_target.metrics import Metrics
from ssd_target.service import TargetServicer

pytestmark = pytest.mark.services

LARGE = pb.GenerateResponse(tokens=pb.GenerateTokens(text="x" * 20_000))
SECONDS = 1.0


class Endless:
    """Writes as Generate does, for as long as somebody reads."""

    def __init__(self) -> None:
        links = Links((), (), (), lambda record: None, lambda: 0)
        metrics = Metrics(lambda: None, lambda: 1, links, 5)
        self.servicer = TargetServicer(metrics, SECONDS, Access(), Accounts(Allowance()))
        self.written = 0
        self.error: SSDError | None = None

    async def serve(self, _: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            while True:
                await self.servicer._write(context, LARGE)
                self.written += 1
        except SSDError as error:
            self.error = error
            await abort(context, error)


async def run(endless: Endless) -> grpc.RpcError:
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        endless.serve, response_serializer=pb.GenerateResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await asyncio.to_thread(stall, port, endless)
    finally:
        await server.stop(None)


def stall(port: int, endless: Endless) -> grpc.RpcError:
    """Read one message, then nothing until the server has given up."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/t/m")(b"", timeout=60)
        next(call)
        while endless.error is None:
            time.sleep(0.05)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    return caught.value


def test_a_client_that_never_reads_is_left() -> None:
    endless = Endless()
    error = asyncio.run(run(endless))
    assert isinstance(endless.error, ReaderStalled)
    assert endless.written > 1
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    assert "--write-timeout" in error.details()  # type: ignore[attr-defined]
