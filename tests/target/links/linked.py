"""A target's links without its engine, and drafts that do no more than welcome them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_target.links.discovery import look_up
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link import DraftLink
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links


class WelcomingDraft:
    """Welcomes whoever comes, keeps the frames that it is sent, and ends its streams when it is
    told to."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.streams = host, 0
        self.messages: list[pb.SpeculateRequest] = []
        self.end = asyncio.Event()
        self.server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(
            self._speculate,
            request_deserializer=pb.SpeculateRequest.FromString,
            response_serializer=pb.SpeculateResponse.SerializeToString,
        )
        service = "ssd.v1.SpeculationService"
        handlers = grpc.method_handlers_generic_handler(service, {"Speculate": method})
        self.server.add_generic_rpc_handlers((handlers,))

    async def start(self, port: int = 0) -> int:
        port = self.server.add_insecure_port(f"{self.host}:{port}")
        await self.server.start()
        return port

    async def _speculate(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        hello = (await context.read()).hello
        welcome = pb.Welcome(
            protocol_version=1, epoch=hello.epoch, max_sequences=8, max_context=100, max_depth=5
        )
        await context.write(pb.SpeculateResponse(welcome=welcome))
        reader = asyncio.ensure_future(self._read(context))
        await self.end.wait()
        reader.cancel()

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.messages.append(message)


class LinkedTarget:
    """Links whose engine keeps the records that it is sent; time passes when a test says so."""

    def __init__(
        self,
        *drafts: str,
        allowed: tuple[str, ...] = (),
        trusted: tuple[str, ...] = (),
        look: Any = look_up,
        discover_seconds: float = 0.1,
    ) -> None:
        self.records: list[Any] = []
        self.now = 0.0
        self.links = Links(
            *(drafts, allowed, trusted, self.records.append, lambda: 0),
            discover_seconds=discover_seconds,
            look=look,
            clock=lambda: self.now,
        )
        self.links.start(TargetIdentity("target", "abc", 1000, 5, None))

    def records_of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def to(self, address: str) -> DraftLink | None:
        """The newest link to an address."""
        found = [link for link in self.links.links.values() if link.address == address]
        return found[-1] if found else None

    def is_up(self, address: str) -> bool:
        link = self.to(address)
        return link is not None and link.state is DraftLinkState.UP


@asynccontextmanager
async def linked_target(*drafts: str, **options: Any) -> AsyncIterator[LinkedTarget]:
    target = LinkedTarget(*drafts, **options)
    try:
        yield target
    finally:
        await target.links.stop()


@asynccontextmanager
async def linked_pair(
    make: Callable[[], WelcomingDraft] = WelcomingDraft,
) -> AsyncIterator[tuple[LinkedTarget, DraftLink, WelcomingDraft]]:
    draft = make()
    address = f"{draft.host}:{await draft.start()}"
    try:
        async with linked_target(address) as target:
            yield target, target.links.links[0], draft
    finally:
        await draft.server.stop(None)
