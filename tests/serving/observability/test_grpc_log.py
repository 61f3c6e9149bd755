"""A peer's bytes do not fill the log by way of gRPC."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_engine.process.sparse_log import SparseLog
from ssd_serving.observability.grpc_log import LOGGERS, PeersInGrpcLog
from tests.wire.raw import RawConnection, framed, headers

SECRET = b"a-secret\xff"
CALLS = 5
SERVICE, METHOD = "ssd.v1.TargetService", "GetModelInfo"


class Server(rpc.TargetServiceServicer):
    """Answers with bytes that are no message, or fails."""

    async def answer(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if request == b"fail":
            raise KeyError("of our own")
        return b"\xff\xff\xff"

    async def serve(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(self.answer)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def filtered() -> Iterator[None]:
    tame = PeersInGrpcLog(SparseLog(clock=lambda: 0.0))
    for name in LOGGERS:
        logging.getLogger(name).addFilter(tame)
    yield
    for name in LOGGERS:
        logging.getLogger(name).removeFilter(tame)


def logged(caplog: pytest.LogCaptureFixture, work: Any) -> list[logging.LogRecord]:
    async def run() -> None:
        server, address = await Server().serve()
        await work(address)
        await server.stop(None)

    asyncio.run(run())
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


def send(address: str, metadata: list[tuple[str, bytes]], message: bytes = b"") -> None:
    with RawConnection(address) as client:
        for _ in range(CALLS):
            head = headers(f"/{SERVICE}/{METHOD}", metadata)  # type: ignore[arg-type]
            client.until_ended(client.call(head, framed(message)))


def test_metadata_that_is_no_text_is_one_line_without_its_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(address: str) -> None:
        await asyncio.to_thread(send, address, [("authorization", SECRET)])

    (line,) = logged(caplog, work)
    assert "can't decode byte 0xff" in line.getMessage()
    assert "secret" not in line.getMessage()
    assert not line.exc_info


def test_answers_that_are_no_message_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def work(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(CALLS):
                await rpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())

    (line,) = logged(caplog, work)
    assert line.getMessage().startswith("gRPC: bytes of a peer that cannot be decoded: ")
    assert not line.exc_info


def test_errors_of_our_own_keep_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    async def work(address: str) -> None:
        await asyncio.to_thread(send, address, [], b"fail")

    lines = logged(caplog, work)
    assert len(lines) == CALLS
    assert all(line.exc_info for line in lines)
