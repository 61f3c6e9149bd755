"""A proxy that makes a peer appear to be of another version: it re-encodes all that is said.

What the peer says is said as its version would; what it hears is what its version understands.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tests.waiting import HANG_SECONDS
from tests.wire.contracts import VALUE, Contract, annotate, released_files

MOST_CALLS = 16
MESSAGES = {  # by method: its request and its response
    "/ssd.v1.TargetService/Generate": ("GenerateRequest", "GenerateResponse"),
    "/ssd.v1.TargetService/GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse"),
    "/ssd.v1.SpeculationService/Speculate": ("SpeculateRequest", "SpeculateResponse"),
    "/ssd.v1.SpeculationService/GetDraftInfo": ("GetDraftInfoRequest", "GetDraftInfoResponse"),
}


class Version:
    """How a peer of some version speaks and hears: without what its contract does not know."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.said: Counter[str] = Counter()
        self._contract = Contract(files)

    def hears(self, name: str, data: bytes) -> Iterator[bytes]:
        yield self._contract.without_unknown(name, data)

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        self.said[name] += 1
        return self.hears(name, data)


class NextMinor(Version):
    """One version ahead: says more, in every message, and says it with new kinds of frames."""

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
        super().__init__(released_files())
        self._newest, self._oldest = newest, oldest

    def speaks(self, name: str, data: bytes) -> Iterator[bytes]:
        message = self._contract.parse(name, data)
        if name == "SpeculateRequest" and message.HasField("hello"):
            message.hello.protocol_version = self._newest
            message.hello.oldest_protocol_version = self._oldest
        if name == "SpeculateResponse" and message.HasField("welcome"):
            message.welcome.protocol_version = self._newest
        yield message.SerializeToString()


class SkewProxy(grpc.GenericRpcHandler):
    """Between a client and a server; one of them is of the version."""

    def __init__(self, server: str, version: Version, of_client: bool) -> None:
        self._to_server = version.speaks if of_client else version.hears
        self._to_client = version.hears if of_client else version.speaks
        self._channel = grpc.insecure_channel(server, [("grpc.use_local_subchannel_pool", 1)])
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_CALLS), handlers=(self,), options=[("grpc.so_reuseport", 0)]
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "SkewProxy":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        names = MESSAGES.get(details.method)
        if names is None:
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._relay, details.method, *names))

    def _relay(
        self,
        method: str,
        request: str,
        response: str,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        said = (each for data in requests for each in self._to_server(request, data))
        call = self._channel.stream_stream(method)(said, timeout=HANG_SECONDS)
        context.add_callback(call.cancel)
        try:
            for data in call:
                yield from self._to_client(response, data)
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())
