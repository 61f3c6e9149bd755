"""The draft's gRPC edge on a real port, with a scripted engine behind it: what the front says to
its engine is kept, and what the engine says is the test's choice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import target_pb2
from ssd_draft.config import DraftEngineOptions
from ssd_draft.front.engine_client import DraftEngine
from ssd_draft.front.handshake import DraftIdentity
from ssd_draft.front.metrics import DraftMetrics
from ssd_draft.front.service import SERVICE, DraftServicer, DraftServing
from ssd_draft.records import (
    DraftEngineStats,
    DraftOutput,
    LinkOutput,
    TargetFrames,
    TargetLinkUp,
)
from ssd_engine.speculation.frames import DraftFrame, Load
from ssd_engine.text.token_ids import pack_tokens
from ssd_serving.engine.records import LinkGone
from ssd_serving.security.access import Access
from tests.waiting import HANG_SECONDS

ENDPOINT = DraftIdentity(
    name="scripted",
    speculator="SPECULATOR_KIND_MODEL",
    tokenizer_fingerprint="abc",
    vocab_size=1000,
    max_context=64,
    max_sequences=5,
    depth=8,
    budget=16,
)
EPOCH = 4
Call = grpc.aio.StreamStreamCall


def hello(**changes: Any) -> pb.SpeculateRequest:
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "oldest_protocol_version": 1,
        "epoch": EPOCH,
        "target_name": "target",
        "tokenizer_fingerprint": "abc",
        "vocab_size": 1000,
        "max_depth": 8,
    }
    return pb.SpeculateRequest(hello=pb.Hello(**{**fields, **changes}))


def opening(sequence: int, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> pb.TargetFrame:
    fields: dict[str, Any] = {
        "prompt": pack_tokens(list(prompt)),
        "max_tokens": len(prompt) + 37,
        "sampling": target_pb2.SamplingOptions(seed=1),
        "verification": target_pb2.VERIFICATION_MODE_COUPLED,
        "depth": 8,
    }
    return pb.TargetFrame(sequence=sequence, open=pb.Open(**{**fields, **changes}))


def frames(*parts: pb.TargetFrame, epoch: int = EPOCH) -> pb.SpeculateRequest:
    return pb.SpeculateRequest(frames=pb.TargetFrames(epoch=epoch, frames=parts))


class ScriptedEngine(DraftEngine):
    def __init__(self, max_frames: int, max_bytes: int, on_drop: Callable[[int], None]) -> None:
        options: DraftEngineOptions = None  # type: ignore[assignment]  # there is no process
        super().__init__(options, max_frames, max_bytes, on_drop)
        self.said: list[Any] = []

    def start(self) -> None:
        self.gone = asyncio.get_running_loop().create_future()

    def send(self, record: Any) -> None:
        self.said.append(record)

    def ups(self) -> list[int]:
        return [record.link for record in self.said if isinstance(record, TargetLinkUp)]

    def downs(self) -> list[int]:
        return [record.link for record in self.said if isinstance(record, LinkGone)]

    def num_frames(self, link: int) -> int:
        records = [r for r in self.said if isinstance(r, TargetFrames) and r.link == link]
        return sum(len(record.frames) for record in records)

    def output(self, link: int, *said: DraftFrame, consumed: int = 0) -> None:
        stats = DraftEngineStats(1, 2, *[0] * 11, [], 0)
        self.dispatch(DraftOutput([LinkOutput(link, list(said), consumed)], Load(3), stats, []))

    def die(self) -> None:
        self.abandon("the engine died")
        self.gone.set_result("the engine died")


class Draft:
    def __init__(self, max_frames: int, max_bytes: int, write_timeout: float) -> None:
        self.metrics = DraftMetrics(
            lambda: self.engine.stats, lambda: 1, lambda state: self.engine.count()[state]
        )
        self.engine = ScriptedEngine(
            max_frames, max_bytes, self.metrics.frames_dropped.labels("slow_reader").inc
        )
        self.servicer = DraftServicer(self.engine, self.metrics, write_timeout, Access())
        self.address = ""

    def serve(self, max_links: int) -> None:
        info = pb.GetDraftInfoResponse(name=ENDPOINT.name)
        self.servicer.serving = DraftServing(ENDPOINT, info, max_links, max_links)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @contextlib.asynccontextmanager
    async def stream(self, by: str = "") -> AsyncIterator[Call]:
        """A stream on a connection of its own, before any message. ``by``: another way there."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(by or self.address, options=options) as channel:
            yield channel.stream_stream(
                f"/{SERVICE}/Speculate",
                request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
                response_deserializer=pb.SpeculateResponse.FromString,
            )(timeout=HANG_SECONDS)

    @contextlib.asynccontextmanager
    async def link(self, by: str = "", **changes: Any) -> AsyncIterator[tuple[Call, int]]:
        """A stream that was welcomed, and its id at the engine."""
        async with self.stream(by) as call:
            await call.write(hello(**changes))
            assert (await call.read()).WhichOneof("message") == "welcome"
            yield call, self.engine.ups()[-1]


@contextlib.asynccontextmanager
async def scripted(
    *,
    serving: bool = True,
    max_links: int = 8,
    max_frames: int = 100,
    max_bytes: int = 2**20,
    write_timeout: float = 30.0,
) -> AsyncIterator[Draft]:
    draft = Draft(max_frames, max_bytes, write_timeout)
    draft.engine.start()
    if serving:
        draft.serve(max_links)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((draft.servicer.handlers(),))
    draft.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield draft
    finally:
        await server.stop(None)


async def try_write(call: Call, message: pb.SpeculateRequest | bytes) -> None:
    """The stream may be over before the message is on its way."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.write(message)


async def status(call: Call) -> tuple[grpc.StatusCode, str]:
    """Read to the end; code and text of the status."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()
