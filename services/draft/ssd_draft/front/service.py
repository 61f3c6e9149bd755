"""SpeculationService: the gRPC edge. Greets, translates frames, never computes."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.front.engine_client import DraftEngine
from ssd_draft.front.handshake import (
    DraftIdentity,
    HandshakeRefused,
    check_hello,
    is_of_another_target,
    link_up,
    make_welcome,
)
from ssd_draft.front.link import TargetLink, TargetLinkState
from ssd_draft.front.metrics import DraftMetrics
from ssd_draft.front.sequence_watch import NoSequenceWatch
from ssd_engine.errors import InputError, SSDError
from ssd_serving.engine.client import EngineGone
from ssd_serving.rpc.frame_messages import (
    FrameLimits,
    TargetMessage,
    decode_target_frames,
    encode_draft_frames,
)
from ssd_serving.rpc.interfaces import interface_to
from ssd_serving.rpc.messages import decode_message, is_newer
from ssd_serving.rpc.plane_messages import encode_report
from ssd_serving.rpc.status import (
    NotServing,
    PeerSilent,
    ReaderStalled,
    ServerFull,
    abort,
    for_log,
)
from ssd_serving.rpc.streams import exchange, write_in_time
from ssd_serving.security.access import Access

log = logging.getLogger(__name__)

SERVICE = "ssd.v1.SpeculationService"
HELLO_SECONDS = 10.0
MAX_GREETING = 64  # streams that have not said hello
MAX_GREETING_OF_ONE = 32  # those of one identity
MAX_BACKLOG = 65_536  # records on their way to the engine, beyond which no link comes up
RETRY_SECONDS = 5.0
LOADING_SECONDS = 2.0  # after which it is worth asking again
INLINE_BYTES = 16_384  # messages above this are parsed on a thread, away from the event loop
REASONS: dict[type[SSDError], str] = {  # why a handshake or a link failed, for metrics
    InputError: "malformed",
    NotServing: "not_serving",
    EngineGone: "not_serving",
    PeerSilent: "timeout",
    ReaderStalled: "stalled",
    ServerFull: "full",
}


@dataclass(frozen=True)
class DraftServing:
    """Everything that a link needs; it is there once the model is loaded."""

    endpoint: DraftIdentity
    info: pb.GetDraftInfoResponse
    max_links: int
    max_links_per_identity: int


@dataclass(frozen=True)
class AdmittedLink:
    """What the handshake settled."""

    link: TargetLink
    name: str
    epoch: int
    limits: FrameLimits


class DraftServicer:
    def __init__(
        self, engine: DraftEngine, metrics: DraftMetrics, write_timeout: float, access: Access
    ) -> None:
        self._engine = engine
        self._access = access
        self._metrics = metrics
        self._write_timeout = write_timeout
        self.watch = NoSequenceWatch()
        self.serving: DraftServing | None = None
        self.draining = False

    @property
    def num_active(self) -> int:
        return self._engine.num_up

    def handlers(self) -> grpc.GenericRpcHandler:
        """Speculate takes raw bytes: a message that does not parse deserves a clear status."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Speculate": grpc.stream_stream_rpc_method_handler(
                    self.speculate,
                    response_serializer=pb.SpeculateResponse.SerializeToString,
                ),
                "GetDraftInfo": grpc.unary_unary_rpc_method_handler(
                    self.get_draft_info,
                    request_deserializer=pb.GetDraftInfoRequest.FromString,
                    response_serializer=pb.GetDraftInfoResponse.SerializeToString,
                ),
            },
        )

    async def get_draft_info(
        self, request: pb.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDraftInfoResponse:
        try:
            info = pb.GetDraftInfoResponse()
            info.CopyFrom(self._ready().info)
        except SSDError as error:
            await abort(context, error)
        info.links = self._engine.num_up
        info.open_sequences = self._engine.load.open_sequences
        stats = self._engine.stats
        if stats is not None:
            info.planes.extend(map(encode_report, stats.planes))
        return info

    async def speculate(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        link = self._engine.new_link()
        # However the stream ends, also in the middle of a write, the link ends with it.
        context.add_done_callback(lambda _: self._engine.end(link))
        try:
            link.identity = self._access.holder(context)
            admitted = await self._shake_hands(link, context)
            await exchange(
                link.failure,
                self._read_frames(admitted, context),
                self._write_frames(admitted, context),
            )
            self._count_end(link, "closed")
        except asyncio.CancelledError:
            self._count_end(link, "lost")
            raise
        except SSDError as error:
            self._count_end(link, _reason(error))
            log.info("link %d ends: %s", link.id, for_log(error), extra={"link": link.id})
            self._engine.end(link)
            await abort(context, error)
        finally:
            self._engine.end(link)
            self.watch.ended(link.id)

    def _count_end(self, link: TargetLink, how: str) -> None:
        metrics = self._metrics
        counter = metrics.links_ended if link.came_up else metrics.handshake_failures
        counter.labels(how).inc()

    # Handshake

    def _ready(self) -> DraftServing:
        if self.serving is None:
            raise NotServing(
                "the endpoint is loading; readiness says when it can be used", LOADING_SECONDS
            )
        return self.serving

    def _admit(self, identity: str) -> DraftServing:
        """Raises SSDError unless there is a place for one more link."""
        serving = self._ready()
        if self.draining:
            raise NotServing("the endpoint is draining; use another one")
        if self._is_full(serving) and self._engine.link_to_give_way(identity) is None:
            raise ServerFull(
                f"the endpoint has its {serving.max_links} links (--max-links)", RETRY_SECONDS
            )
        up, own_greeting = self._engine.num_links_of(identity)
        if up >= serving.max_links_per_identity:
            raise ServerFull(
                f"{identity!r} has its {serving.max_links_per_identity} links "
                "(--max-links-per-identity)",
                RETRY_SECONDS,
            )
        greeting = self._engine.count()[TargetLinkState.GREETING]
        crowded = greeting > MAX_GREETING or own_greeting > MAX_GREETING_OF_ONE
        if crowded or self._engine.backlog > MAX_BACKLOG:
            raise ServerFull("too many handshakes at a time", RETRY_SECONDS)
        return serving

    def _is_full(self, serving: DraftServing) -> bool:
        return self._engine.num_up >= serving.max_links

    def _make_room(self, identity: str, serving: DraftServing) -> None:
        """Nobody keeps a place by having come first: whoever has most links gives one up."""
        goes = self._engine.link_to_give_way(identity) if self._is_full(serving) else None
        if goes is not None:
            self._engine.end(goes)
            words = f"{goes.identity!r} has most links: this one gives way to one of {identity!r}"
            goes.fail(ServerFull(words, RETRY_SECONDS))

    async def _shake_hands(
        self, link: TargetLink, context: grpc.aio.ServicerContext
    ) -> AdmittedLink:
        self._admit(link.identity)
        hello = await _read_hello(link, context)
        serving = self._admit(link.identity)  # a place may have gone while the target was silent
        limits = check_hello(hello, serving.endpoint)
        self._make_room(link.identity, serving)
        admitted = AdmittedLink(link, hello.target_name or "?", hello.epoch, limits)
        interface = interface_to(context.peer())
        self._engine.welcome(link, link_up(link.id, hello, limits, interface))
        welcome = pb.SpeculateResponse(welcome=make_welcome(hello, serving.endpoint))
        await self._write(context, welcome)
        words = (link.id, admitted.name, admitted.epoch)
        log.info("link %d is up: target %r, epoch %d", *words, extra={"link": link.id})
        if is_of_another_target(hello, serving.endpoint):
            about = (link.id, serving.endpoint.verifier, admitted.name)
            log.warning("link %d: this head was trained for %s, the target is %r", *about)
        return admitted

    # Frames

    async def _read_frames(self, admitted: AdmittedLink, context: grpc.aio.ServicerContext) -> None:
        """Ends when the target closes its side."""
        link = admitted.link
        while True:
            await link.window.room()
            data = await context.read()
            if data is grpc.aio.EOF:
                words = (link.id, admitted.name)
                log.info("link %d: target %r has left", *words, extra={"link": link.id})
                return
            decoded = await self._decode(data, admitted)
            self._engine.push_frames(link, decoded.refusals)
            self.watch.received(link.id, decoded.frames)
            self._engine.pass_on(link, decoded.frames, len(data))

    async def _decode(self, data: bytes, admitted: AdmittedLink) -> TargetMessage:
        if len(data) <= INLINE_BYTES:
            decoded, stale = _decode(data, admitted)
        else:
            decoded, stale = await asyncio.to_thread(_decode, data, admitted)
        self._metrics.frames_received.inc(len(decoded.frames))
        if stale:
            self._metrics.frames_dropped.labels("epoch").inc(stale)
        if decoded.unknown:
            self._metrics.frames_unknown.inc(decoded.unknown)
        return decoded

    async def _write_frames(
        self, admitted: AdmittedLink, context: grpc.aio.ServicerContext
    ) -> None:
        while True:
            frames = await admitted.link.outbox.take()
            await self._write(
                context, encode_draft_frames(admitted.epoch, frames, self._engine.load)
            )
            self._metrics.frames_sent.inc(len(frames))
            self.watch.sent(admitted.link.id, frames)

    async def _write(
        self, context: grpc.aio.ServicerContext, response: pb.SpeculateResponse
    ) -> None:
        await write_in_time(context, response, self._write_timeout, "--link-write-timeout")


async def _read_hello(link: TargetLink, context: grpc.aio.ServicerContext) -> pb.Hello:
    reading = asyncio.ensure_future(context.read())
    waiting: list[asyncio.Future[Any]] = [reading, link.failure]
    try:
        await asyncio.wait(waiting, timeout=HELLO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if link.failure.done():
            raise link.failure.result()
        if not reading.done():
            raise PeerSilent(f"hello: did not come within {HELLO_SECONDS:g} s")
        data = reading.result()
    finally:
        reading.cancel()
    if data is grpc.aio.EOF:
        raise HandshakeRefused("no_hello", "hello: the stream ended without it")
    message = decode_message(pb.SpeculateRequest, data)
    if message.WhichOneof("message") != "hello":
        raise HandshakeRefused("no_hello", "hello: must be the first message of a stream")
    return message.hello


def _decode(data: bytes, admitted: AdmittedLink) -> tuple[TargetMessage, int]:
    """Frames, and how many were dropped as another epoch's."""
    message = decode_message(pb.SpeculateRequest, data)
    kind = message.WhichOneof("message")
    if kind is None and is_newer(message):
        return TargetMessage([], [], unknown=1), 0
    if kind != "frames":
        problem = "comes once, at the beginning" if kind == "hello" else "is missing: set frames"
        raise InputError(kind or "message", problem)
    if message.frames.epoch != admitted.epoch:
        return TargetMessage([], []), len(message.frames.frames)
    return decode_target_frames(message.frames, admitted.limits), 0


def _reason(error: SSDError) -> str:
    if isinstance(error, HandshakeRefused):
        return error.reason
    return REASONS.get(type(error), "other")
