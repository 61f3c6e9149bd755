"""Links to speculation endpoints: one stream each, made again whenever it breaks.

Nothing here can hold a generation up. Frames to an endpoint are put into a bounded queue; a full
one ends the epoch, as does an endpoint that breaks the protocol or floods. What fails is logged
once.
"""

import asyncio
import contextlib
import fnmatch
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import speculation_pb2_grpc as rpc
from ssd_engine.errors import InputError
from ssd_engine.frames import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, TargetFrame
from ssd_target.link_state import LinkEvent, LinkState, transition
from ssd_target.records import LinkDown, LinkFrames, LinkUp, PlaneAbility
from ssd_target.wire import decode_draft_frames, encode_target_frames

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 3.0
BACK_OFF = (0.1, 2.0)  # first and longest pause between tries, in seconds
MISFIT_PAUSE = 30.0
OUTBOX = 1024  # messages that wait for the wire
MAX_BYTES = 4 * 1024 * 1024  # of a message from an endpoint
RATE = 2 * 1024 * 1024  # bytes per second that an endpoint may send, on average
BURST = 8 * 1024 * 1024
CALM = 256  # records that may wait for the engine before a link is read more slowly
MAX_NAMED = 64  # endpoints beyond the operator's own that requests may add


@dataclass(frozen=True)
class Identity:
    """What this target says of itself."""

    name: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_depth: int
    plane: PlaneAbility | None


class LinkBroken(Exception):
    """The epoch is over; says why."""


class Misfit(LinkBroken):
    """The two peers do not fit: trying again soon is of no use."""


class Allowance:
    """Bytes that an endpoint may send: a bucket that fills with time."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at = time.monotonic()

    def spend(self, size: int) -> bool:
        now = time.monotonic()
        self._left = min(BURST, self._left + RATE * (now - self._at)) - size
        self._at = now
        return self._left >= 0


class Link:
    def __init__(
        self,
        number: int,
        address: str,
        named: bool,
        trusted: bool,
        identity: Identity,
        to_engine: Callable[[Any], None],
        backlog: Callable[[], int],
    ) -> None:
        self.number = number
        self.address = address
        self.named = named  # by a request, not by the operator
        self.trusted = trusted  # with rejection verification
        self.state = LinkState.CONNECTING
        self.reason = "not tried yet"  # why it is not up
        self.draft_name = ""
        self.failures = 0
        self.epoch = 0
        self.last_named = time.monotonic()
        self._identity = identity
        self._to_engine = to_engine
        self._backlog = backlog
        self._outbox: asyncio.Queue[list[TargetFrame]] = asyncio.Queue(OUTBOX)
        self._broken: asyncio.Future[str] | None = None
        self._pause = BACK_OFF[0]
        self._logged = ""

    def send(self, epoch: int, frames: list[TargetFrame]) -> None:
        """A put; never waits."""
        if self.state is not LinkState.UP or epoch != self.epoch:
            return
        try:
            self._outbox.put_nowait(frames)
        except asyncio.QueueFull:
            self.break_off(epoch, "the endpoint reads too slowly")

    def break_off(self, epoch: int, reason: str) -> None:
        """End this epoch."""
        if epoch == self.epoch and self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                event = await self._one_epoch()
                self.state = transition(self.state, event)
                pause = MISFIT_PAUSE if event is LinkEvent.MISFIT else self._pause
                self._pause = min(2 * self._pause, BACK_OFF[1])
                await asyncio.sleep(pause * random.uniform(0.75, 1.0))
                self.state = transition(self.state, LinkEvent.RETRY)
        finally:
            self.state = transition(self.state, LinkEvent.CLOSE)

    async def _one_epoch(self) -> LinkEvent:
        """Connect and follow the stream to its end."""
        self.epoch += 1
        self._outbox = asyncio.Queue(OUTBOX)
        self._broken = asyncio.get_running_loop().create_future()
        try:
            async with self._channel() as channel:
                await self._follow(rpc.SpeculationServiceStub(channel).Speculate())
        except Misfit as error:
            self._failed(str(error))
            return LinkEvent.MISFIT
        except LinkBroken as error:
            self._failed(str(error))
        except grpc.aio.AioRpcError as error:
            self._failed(f"{error.code().name}: {error.details()}")
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return LinkEvent.MISFIT
        finally:
            if self.state is LinkState.UP:
                self._to_engine(LinkDown(self.number, self.epoch))
        return LinkEvent.FAIL

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self.address,
            options=[
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
            raise LinkBroken("no answer to hello") from None
        if first is grpc.aio.EOF:
            await _raise_status(call)
        self._welcomed(_welcome(first, self.epoch))
        await self._first_end(call)

    def _hello(self) -> pb.SpeculateRequest:
        identity = self._identity
        plane = _offer(identity.plane) if self.trusted else None
        return pb.SpeculateRequest(
            hello=pb.Hello(
                tensor_plane=plane,
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
        self.state = transition(self.state, LinkEvent.WELCOME)
        self.reason, self._logged = "", ""
        self.draft_name = welcome.draft_name[:256]
        self._pause = BACK_OFF[0]
        log.info("link to %s (%s) is up", self.address, self.draft_name)
        self._to_engine(
            LinkUp(
                self.number,
                self.epoch,
                self.named,
                welcome.max_sequences,
                welcome.max_context,
                welcome.max_depth,
                self.address.rpartition(":")[0].removeprefix("[").removesuffix("]"),
                self.trusted,
            )
        )

    async def _first_end(self, call: Any) -> None:
        """Read and write until one of them ends or the epoch is broken off."""
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        broken = self._broken
        if broken is None:
            raise RuntimeError("no epoch")
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, broken}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if broken in done:
                raise LinkBroken(broken.result())
            for task in done:
                await task
        finally:
            call.cancel()
            for task in (reader, writer):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _read(self, call: Any) -> None:
        allowance = Allowance()
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                await _raise_status(call)
            if not allowance.spend(message.ByteSize()):
                raise LinkBroken("the endpoint floods")
            if message.WhichOneof("message") != "frames":
                raise LinkBroken("the endpoint sent a message that is no frames")
            if message.frames.epoch == self.epoch:
                self._deliver(message.frames)
            while self._backlog() > CALM:
                await asyncio.sleep(0.002)

    def _deliver(self, message: pb.DraftFrames) -> None:
        try:
            frames, load = decode_draft_frames(message)
        except InputError as error:
            raise LinkBroken(f"the endpoint broke the protocol: {error}") from None
        self._to_engine(LinkFrames(self.number, self.epoch, frames, load))

    async def _write(self, call: Any) -> None:
        while True:
            frames = await self._outbox.get()
            while not self._outbox.empty():
                frames += self._outbox.get_nowait()
            await call.write(encode_target_frames(self.epoch, frames))

    def _failed(self, reason: str) -> None:
        """Once for each reason: an endpoint that stays away is no news."""
        self.reason = reason.splitlines()[0][:300] if reason else "unknown"
        self.failures += 1
        if self.reason != self._logged:
            log.warning("link to %s is down: %s", self.address, self.reason)
            self._logged = self.reason


def _offer(ability: PlaneAbility | None) -> pb.TensorPlaneOffer | None:
    if ability is None:
        return None
    kinds = [f"TENSOR_PLANE_KIND_{kind.upper()}" for kind in ability.kinds]
    return pb.TensorPlaneOffer(
        kinds=kinds,
        host_id=ability.host_id,
        device_id=ability.device_id,
    )


def _welcome(message: pb.SpeculateResponse, epoch: int) -> pb.Welcome:
    if message.WhichOneof("message") != "welcome":
        raise LinkBroken("the endpoint did not begin with welcome")
    welcome = message.welcome
    version = welcome.protocol_version
    if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        raise Misfit(f"protocol version {version} is not known here")
    if welcome.epoch != epoch:
        raise LinkBroken("the endpoint welcomed another epoch")
    if not welcome.max_sequences or not welcome.max_depth:
        raise Misfit("the endpoint offers no sequences or no depth")
    return welcome


async def _raise_status(call: Any) -> None:
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        raise Misfit(details)
    raise LinkBroken(
        "the stream ended" if code is grpc.StatusCode.OK else f"{code.name}: {details}"
    )


def _matches(address: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(address, pattern) for pattern in patterns)


class Links:
    """All links of a target: the operator's, and those that requests name."""

    def __init__(
        self,
        drafts: Sequence[str],
        allowed: Sequence[str],
        trusted: Sequence[str],
        to_engine: Callable[[Any], None],
        backlog: Callable[[], int],
    ) -> None:
        self._drafts = list(dict.fromkeys(drafts))
        self._allowed = list(allowed)
        self._trusted = list(trusted)
        self._to_engine = to_engine
        self._backlog = backlog
        self._identity: Identity | None = None
        self.links: dict[int, Link] = {}
        self._by_address: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, identity: Identity) -> None:
        self._identity = identity
        for address in self._drafts:
            self._dial(address, named=False)

    def number_of(self, address: str) -> int:
        """The link to an endpoint that a request names; dialled only if the operator allows it."""
        known = self._by_address.get(address)
        if known is not None:
            self.links[known].last_named = time.monotonic()
            return known
        if not _matches(address, self._allowed):
            raise InputError(
                "speculation.endpoints",
                f"{address!r} is not allowed here; the operator names endpoints with --draft "
                "and --allow-draft",
            )
        if sum(link.named for link in self.links.values()) >= MAX_NAMED:
            raise InputError("speculation.endpoints", f"at most {MAX_NAMED} may be added")
        return self._dial(address, named=True)

    def _dial(self, address: str, named: bool) -> int:
        if self._identity is None:
            raise RuntimeError("links are dialled once the tokenizer is loaded")
        number = len(self.links)
        trusted = _matches(address, self._trusted)
        link = Link(number, address, named, trusted, self._identity, self._to_engine, self._backlog)
        self.links[number] = link
        self._by_address[address] = number
        task = asyncio.create_task(link.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return number

    def send(self, link: int, epoch: int, frames: list[TargetFrame]) -> None:
        self.links[link].send(epoch, frames)

    def stalled(self, link: int, epoch: int, reason: str) -> None:
        self.links[link].break_off(epoch, reason)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
