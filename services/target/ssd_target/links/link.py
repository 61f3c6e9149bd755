"""A link to one speculation endpoint: a stream that is made again whenever it breaks.

Nothing here can hold a generation up. Frames to an endpoint are put into a bounded queue; a full
one ends the epoch, as does an endpoint that breaks the protocol or takes too much of our time. What
fails is counted by reason and logged once.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import ConfigError, InputError
from ssd_engine.process.addresses import host_of
from ssd_engine.speculation.frames import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Notice,
    NoticeKind,
    Open,
    TargetFrame,
)
from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_serving.rpc.messages import decode_message, is_newer
from ssd_serving.rpc.plane_messages import encode_offer
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.endpoint_addresses import EndpointAddress
from ssd_target.links.link_state import DraftLinkEvent, DraftLinkState, transition
from ssd_target.links.wire import decode_draft_frames, encode_target_frames
from ssd_target.records.engine_records import DraftFrames, DraftLinkDown, DraftLinkUp

log = logging.getLogger(__name__)

SPECULATE = "/ssd.v1.SpeculationService/Speculate"
HANDSHAKE_SECONDS = 3.0
BACK_OFF = (0.1, 2.0)  # first and longest pause between tries, in seconds
MISFIT_PAUSE = 30.0
STEADY_SECONDS = 5.0  # up for so long, a link's earlier failures are forgotten
MAX_LOGGED = 8  # failures, until then
OUTBOX = 1024  # messages that wait for the wire
MAX_FRAMES = 512  # frames in one message to an endpoint
ENOUGH_BYTES = 1 << 20  # a message of so many bytes takes no further frame
MAX_BYTES = 4 * 1024 * 1024  # the largest message from an endpoint
SHARE = 0.25  # share of this process's time that an endpoint may take, on average
BURST = 1.0  # seconds
MESSAGE_SECONDS = 2e-4  # what a message takes, whatever it says
CALM = 256  # records that may wait for the engine before a link is read more slowly
FORGET_SECONDS = 60.0  # after which one that is down and not named again makes room


@dataclass(frozen=True)
class TargetIdentity:
    """What this target says of itself."""

    name: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_depth: int
    plane: PlaneOffer | None


class LinkBroken(Exception):
    """The epoch is over; says why. ``reason`` is one of a few words, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EndpointMisfit(LinkBroken):
    """The two peers do not fit, or the other one misbehaves: trying again soon is of no use."""


class TimeAllowance:
    """Time that an endpoint may cost this process: a bucket that fills as time goes by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._left = BURST
        self._at = clock()

    def spend(self, seconds: float) -> bool:
        now = self._now()
        self._left = min(BURST, self._left + SHARE * (now - self._at)) - seconds
        self._at = now
        return self._left >= 0


class DraftLink:
    def __init__(
        self,
        number: int,
        place: EndpointAddress,
        named: bool,
        trusted: bool,
        identity: TargetIdentity,
        to_engine: Callable[[Any], None],
        backlog: Callable[[], int],
        credentials: DraftCredentials,
        on_failure: Callable[["DraftLink"], None] = lambda link: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self.address = place.address  # that is dialled
        self.server_name = place.server_name  # whom to expect there: what somebody wrote
        self.source = ""  # what named it, where it was found by a look-up
        self.left = False  # its source names it no more: it is of use until it breaks
        self.named = named  # by a request, not by the operator
        self.trusted = trusted  # with rejection verification
        self.state = DraftLinkState.CONNECTING
        self.reason = "not tried yet"  # why it is not up
        self.draft_name = ""
        self.failures: Counter[str] = Counter()  # epochs that failed, by reason
        self.unknown = 0  # frames and messages that only a newer endpoint understands
        self.epoch = 0
        self._clock = clock
        self.last_named = clock()
        self._identity = identity
        self._to_engine = to_engine
        self._backlog = backlog
        self._credentials = credentials
        self._on_failure = on_failure
        self._outbox: asyncio.Queue[list[TargetFrame]] = asyncio.Queue(OUTBOX)
        self._broken: asyncio.Future[LinkBroken] | None = None
        self._pause = BACK_OFF[0]
        self._steady = True  # it has not failed lately
        self._said_up = False  # since it failed
        self._logged: set[str] = set()  # failures since it was steady

    def send(self, epoch: int, frames: list[TargetFrame]) -> None:
        """A put; never waits."""
        if self.state is not DraftLinkState.UP or epoch != self.epoch:
            return
        try:
            self._outbox.put_nowait(frames)
        except asyncio.QueueFull:
            self.break_off(epoch, LinkBroken("slow", "the endpoint reads too slowly"))

    def name_again(self) -> None:
        """A request has named it."""
        self.last_named = self._clock()

    def break_off(self, epoch: int, why: LinkBroken) -> None:
        """End this epoch."""
        if epoch == self.epoch and self._broken is not None and not self._broken.done():
            self._broken.set_result(why)

    async def run(self) -> None:
        """Until cancelled; without a use for it, until it fails."""
        try:
            while not self._is_forgotten:
                event = await self._one_epoch()
                self.state = transition(self.state, event)
                if self.left:
                    return
                pause = MISFIT_PAUSE if event is DraftLinkEvent.MISFIT else self._pause
                self._pause = min(2 * self._pause, BACK_OFF[1])
                await asyncio.sleep(pause * random.uniform(0.75, 1.0))
                self.state = transition(self.state, DraftLinkEvent.RETRY)
        finally:
            self.state = transition(self.state, DraftLinkEvent.CLOSE)

    @property
    def _is_forgotten(self) -> bool:
        return self.named and self._clock() - self.last_named > FORGET_SECONDS

    async def _one_epoch(self) -> DraftLinkEvent:
        """Connect and follow the stream to its end."""
        self.epoch += 1
        self._outbox = asyncio.Queue(OUTBOX)
        self._broken = asyncio.get_running_loop().create_future()
        try:
            async with self._channel() as channel:
                # Messages come as bytes: one that does not parse is the endpoint's fault, not ours.
                speculate = channel.stream_stream(
                    SPECULATE, request_serializer=pb.SpeculateRequest.SerializeToString
                )
                shown = self._credentials.metadata(host_of(self.address))
                await self._follow(speculate(metadata=shown))
        except ConfigError as error:
            self._failed("credentials", str(error))
        except OSError as error:
            self._failed("credentials", f"{error.filename}: {error.strerror}")
        except EndpointMisfit as error:
            self._failed(error.reason, str(error))
            return DraftLinkEvent.MISFIT
        except LinkBroken as error:
            self._failed(error.reason, str(error))
        except grpc.aio.AioRpcError as error:
            self._failed(_reason(error.code()), f"{error.code().name}: {error.details()}")
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return DraftLinkEvent.MISFIT
        except asyncio.InvalidStateError:
            self._failed("ended", "the stream ended")  # while a frame was on its way
        finally:
            self._broken = None
            if self.state is DraftLinkState.UP:
                self._to_engine(DraftLinkDown(self.number, self.epoch))
        return DraftLinkEvent.FAIL

    def _channel(self) -> grpc.aio.Channel:
        return self._credentials.channel(
            f"dns:///{self.address}",  # whatever the host is called, it is no other scheme
            self.server_name,
            [
                ("grpc.max_receive_message_length", MAX_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 5_000),
            ],
        )

    async def _follow(self, call: Any) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await call.write(self._hello())
                first = await call.read()
        except TimeoutError:
            call.cancel()
            raise LinkBroken("silent", "no answer to hello") from None
        if first is grpc.aio.EOF:
            await _raise_status(call)
        self._welcomed(_welcome(_parse(first), self.epoch))
        proof = asyncio.get_running_loop().call_later(STEADY_SECONDS, self._has_proved_steady)
        try:
            await self._first_end(call)
        finally:
            proof.cancel()

    def _hello(self) -> pb.SpeculateRequest:
        identity = self._identity
        offer = identity.plane if self.trusted else None
        return pb.SpeculateRequest(
            hello=pb.Hello(
                tensor_plane=None if offer is None else encode_offer(offer),
                protocol_version=PROTOCOL_VERSION,
                oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
                epoch=self.epoch,
                target_name=identity.name,
                tokenizer_fingerprint=identity.tokenizer_fingerprint,
                vocab_size=identity.vocab_size,
                max_depth=identity.max_depth,
            )
        )

    def _welcomed(self, welcome: pb.Welcome) -> None:
        self.state = transition(self.state, DraftLinkEvent.WELCOME)
        self.reason = ""
        self.draft_name = _printable(welcome.draft_name, 256)
        if self._steady:
            self._say_up()
        self._steady = False
        self._to_engine(
            DraftLinkUp(
                self.number,
                self.epoch,
                self.named,
                welcome.max_sequences,
                welcome.max_context,
                welcome.max_depth,
                host_of(self.address),
                self.trusted,
            )
        )

    def _has_proved_steady(self) -> None:
        """Up for a while. One that comes up only to fail again is no news, and is tried less."""
        self._pause = BACK_OFF[0]
        self._steady = True
        self._logged.clear()
        if not self._said_up:
            self._say_up()

    def _say_up(self) -> None:
        self._said_up = True
        about = {"link": self.number}
        log.info("link to %s (%s) is up", self.address, self.draft_name, extra=about)

    async def _first_end(self, call: Any) -> None:
        """Read and write until one of them ends or the epoch is broken off.

        What ended it is raised from here, and knows this frame; the frame forgets who holds it. In
        a circle of them the call, and so its connection, would stay until somebody collects it.
        """
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        broken = self._broken
        if broken is None:
            raise RuntimeError("no epoch")
        try:
            raise await _first_error(broken, reader, writer)
        finally:
            call.cancel()
            await _cancelled(reader, writer)
            del reader, writer, broken

    async def _read(self, call: Any) -> None:
        allowance = TimeAllowance()
        while True:
            data = await call.read()
            if data is grpc.aio.EOF:
                await _raise_status(call)
            begin = time.thread_time()
            self._deliver(_parse(data))
            if not allowance.spend(MESSAGE_SECONDS + time.thread_time() - begin):
                raise EndpointMisfit("flood", "the endpoint floods")
            while self._backlog() > CALM:
                await asyncio.sleep(0.002)

    def _deliver(self, message: pb.SpeculateResponse) -> None:
        kind = message.WhichOneof("message")
        if kind is None and is_newer(message):
            self.unknown += 1
            return
        if kind != "frames":
            raise EndpointMisfit("protocol", "the endpoint sent a message that is no frames")
        if message.frames.epoch != self.epoch:
            return
        try:
            decoded = decode_draft_frames(message.frames)
        except InputError as error:
            raise EndpointMisfit("protocol", f"the endpoint broke the protocol: {error}") from None
        self.unknown += decoded.unknown
        self._to_engine(DraftFrames(self.number, self.epoch, decoded.frames, decoded.load))
        if any(isinstance(f, Notice) and f.kind is NoticeKind.LEAVING for f in decoded.frames):
            # The engine moves its sequences; the endpoint waits for nothing but our farewell.
            raise LinkBroken("leaving", "the endpoint leaves")

    async def _write(self, call: Any) -> None:
        while True:
            frames = await self._outbox.get()
            while not self._outbox.empty():
                frames += self._outbox.get_nowait()
            for part in in_messages(frames):
                await call.write(encode_target_frames(self.epoch, part))

    def _failed(self, reason: str, message: str) -> None:
        """Said once: an endpoint that stays away is no news."""
        self.reason = _printable(message, 300)
        self.failures[reason] += 1
        self._said_up = False
        if self.reason not in self._logged and len(self._logged) < MAX_LOGGED:
            about = {"link": self.number}
            log.warning("link to %s is down: %s", self.address, self.reason, extra=about)
            self._logged.add(self.reason)
        self._on_failure(self)


def in_messages(frames: Sequence[TargetFrame]) -> Iterator[list[TargetFrame]]:
    """Frames in their order, as many in a message as it may have."""
    part: list[TargetFrame] = []
    size = 0
    for frame in frames:
        if len(part) == MAX_FRAMES or size >= ENOUGH_BYTES:
            yield part
            part, size = [], 0
        part.append(frame)
        size += _size(frame)
    if part:
        yield part


def _size(frame: TargetFrame) -> int:
    """Bytes, about."""
    if not isinstance(frame, Open):
        return 64
    return 256 + len(frame.prompt) + len(frame.output) + 16 * len(frame.sampling.logit_bias)


async def _first_error(
    broken: "asyncio.Future[LinkBroken]", *tasks: "asyncio.Task[None]"
) -> BaseException:
    """Wait until one of the tasks ends or the link is broken; returns why."""
    ends: set[asyncio.Future[Any]] = {broken, *tasks}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        return broken.result()
    errors = (task.exception() for task in tasks if task.done())
    return next(errors) or LinkBroken("ended", "the stream ended")


async def _cancelled(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _printable(text: str, length: int) -> str:
    """What an endpoint says, fit for a log."""
    return "".join(c if c.isprintable() else " " for c in text[:length])


def _parse(data: bytes) -> pb.SpeculateResponse:
    try:
        return decode_message(pb.SpeculateResponse, data)
    except InputError as error:
        raise EndpointMisfit("protocol", f"the endpoint broke the protocol: {error}") from None


def _welcome(message: pb.SpeculateResponse, epoch: int) -> pb.Welcome:
    if message.WhichOneof("message") != "welcome":
        raise EndpointMisfit("protocol", "the endpoint did not begin with welcome")
    welcome = message.welcome
    version = welcome.protocol_version
    if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        older = "endpoint" if version < OLDEST_PROTOCOL_VERSION else "target"
        raise EndpointMisfit(
            "misfit",
            f"the endpoint speaks protocol version {version}, this target "
            f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: upgrade the {older}",
        )
    if welcome.epoch != epoch:
        raise EndpointMisfit("protocol", "the endpoint welcomed another epoch")
    if not welcome.max_sequences or not welcome.max_depth:
        raise EndpointMisfit("misfit", "the endpoint offers no sequences or no depth")
    return welcome


def _reason(code: grpc.StatusCode) -> str:
    return "misfit" if code is grpc.StatusCode.FAILED_PRECONDITION else code.name.lower()


async def _raise_status(call: Any) -> None:
    """The stream is over."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        raise LinkBroken("ended", "the stream ended")
    kind = EndpointMisfit if code is grpc.StatusCode.FAILED_PRECONDITION else LinkBroken
    raise kind(_reason(code), f"{code.name}: {details}")
