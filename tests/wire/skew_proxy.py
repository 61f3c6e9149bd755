"""A proxy that makes a peer appear to be of another version: it re-encodes all that is said.

What the peer says is said as its version would; what it hears is what its version understands.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc

from tests.wire.contracts import VALUE, Contract, annotate, next_files, released_files

Translate = Callable[[str, bytes], Iterator[bytes]]  # message name and bytes: what becomes of it
MESSAGES = {  # by method: its request and its response
    "/ssd.v1.TargetService/Generate": ("GenerateRequest", "GenerateResponse"),
    "/ssd.v1.TargetService/GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse"),
    "/ssd.v1.SpeculationService/Speculate": ("SpeculateRequest", "SpeculateResponse"),
    "/ssd.v1.SpeculationService/GetDraftInfo": ("GetDraftInfoRequest", "GetDraftInfoResponse"),
}


class Version:
    """How a peer of some version speaks and hears."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        raise NotImplementedError

    def hears(self, name: str, data: bytes) -> Iterator[bytes]:
        raise NotImplementedError


class Released(Version):
    """Of the released contract; later fields are neither said nor heard."""

    def __init__(self) -> None:
        super().__init__()
        self._contract = Contract(released_files())

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        self.said[name] += 1
        yield self._contract.without_unknown(name, data)

    hears = speaks


class NextMinor(Version):
    """One version ahead: says more, in every message, and says it with new kinds of frames."""

    def __init__(self) -> None:
        super().__init__()
        self._contract = Contract(next_files())

    def hears(self, name: str, data: bytes) -> Iterator[bytes]:
        yield self._contract.without_unknown(name, data)

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        message = self._contract.parse(name, data)
        change = getattr(self, f"_{name}", None)
        if change is not None:
            yield from (each.SerializeToString() for each in change(message))
        annotate(message)
        self.said[name] += 1
        yield message.SerializeToString()

    # What a newer peer does beyond new fields; yields messages that go before.

    def _GenerateRequest(self, message: Any) -> Iterator[Any]:
        message.speculation.mode = message.speculation.verification = VALUE
        return iter(())

    def _GenerateResponse(self, message: Any) -> Iterator[Any]:
        if message.WhichOneof("event") == "tokens":
            message.tokens.origins[:] = [VALUE] * len(message.tokens.origins)
            yield type(message)(member_0=b"news")
        if message.WhichOneof("event") == "finish":
            message.finish.reason = VALUE

    def _SpeculateRequest(self, message: Any) -> Iterator[Any]:
        if message.WhichOneof("message") == "hello":
            message.hello.protocol_version += 1
            message.hello.tensor_plane.kinds.append(VALUE)
            return
        for frame in message.frames.frames:
            if frame.WhichOneof("body") == "launch":
                frame.launch.source = VALUE
        message.frames.frames.add(sequence=1, member_0=b"a new kind of frame")
        yield type(message)(member_0=b"a new kind of message")

    def _SpeculateResponse(self, message: Any) -> Iterator[Any]:
        if message.WhichOneof("message") == "welcome":
            message.welcome.speculator = VALUE
            return
        frames = message.frames.frames
        sequence = frames[0].sequence if frames else 1
        frames.add(sequence=sequence, notice={"kind": VALUE, "reason": "a new kind of notice"})
        frames.add(sequence=sequence, member_0=b"a new kind of frame")
        yield type(message)(member_0=b"a new kind of message")


class Apart(Version):
    """Says of itself that it is of other versions of the protocol."""

    def __init__(self, newest: int, oldest: int) -> None:
        super().__init__()
        self._contract = Contract(released_files())
        self._newest, self._oldest = newest, oldest

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        message = self._contract.parse(name, data)
        if name == "SpeculateRequest" and message.HasField("hello"):
            message.hello.protocol_version = self._newest
            message.hello.oldest_protocol_version = self._oldest
        if name == "SpeculateResponse" and message.HasField("welcome"):
            message.welcome.protocol_version = self._newest
        yield message.SerializeToString()

    def hears(self, name: str, data: bytes) -> Iterator[bytes]:
        yield data


class SkewProxy(grpc.GenericRpcHandler):
    """Between a client and a server; one of them is of the version."""

    def __init__(self, server: str, version: Version, of_client: bool) -> None:
        self._server_address = server
        self._to_server = version.speaks if of_client else version.hears
        self._to_client = version.hears if of_client else version.speaks
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "SkewProxy":
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._server_address)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        names = MESSAGES.get(details.method)
        if names is None:
            return None
        return grpc.stream_stream_rpc_method_handler(self._relay(details.method, *names))

    def _relay(self, method: str, request: str, response: str) -> Any:
        async def relay(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(method)(
                _translated(requests, request, self._to_server), timeout=context.time_remaining()
            )
            try:
                async for data in _translated(call, response, self._to_client):
                    yield data
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
            finally:
                call.cancel()

        return relay


async def _translated(messages: Any, name: str, translate: Translate) -> AsyncIterator[bytes]:
    async for data in messages:
        for said in translate(name, data):
            yield said
