"""The frames of one epoch of a link, in and out, until one side ends it.

Nothing here can hold a generation up. Frames to an endpoint are put into a bounded queue; a full
one ends the epoch, as does an endpoint that breaks the protocol or takes too much of our time.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import InputError
from ssd_engine.speculation.frames import Notice, NoticeKind, Open, TargetFrame
from ssd_serving.rpc.frame_messages import decode_draft_frames, encode_target_frames
from ssd_serving.rpc.messages import is_newer
from ssd_serving.rpc.streams import exchange
from ssd_target.links.handshake import parse_response
from ssd_target.links.link_errors import EndpointMisfit, LinkBroken, raise_status
from ssd_target.links.link_report import LinkReport
from ssd_target.records.engine_records import DraftFrames

OUTBOX = 1024  # messages that wait for the wire
MAX_FRAMES = 512  # frames in one message to an endpoint
ENOUGH_BYTES = 1 << 20  # a message of so many bytes takes no further frame
SHARE = 0.25  # share of this process's time that an endpoint may take, on average
BURST = 1.0  # seconds
MESSAGE_SECONDS = 2e-4  # what a message takes, whatever it says
CALM = 256  # records that may wait for the engine before a link is read more slowly


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


class FrameStream:
    def __init__(
        self,
        link: int,
        epoch: int,
        to_engine: Callable[[Any], None],
        backlog: Callable[[], int],
        report: LinkReport,
    ) -> None:
        self._link, self._epoch = link, epoch
        self._to_engine, self._backlog, self._report = to_engine, backlog, report
        self._outbox: asyncio.Queue[list[TargetFrame]] = asyncio.Queue(OUTBOX)
        self._broken: asyncio.Future[LinkBroken] = asyncio.get_running_loop().create_future()

    def send(self, frames: list[TargetFrame]) -> None:
        """A put; never waits."""
        try:
            self._outbox.put_nowait(frames)
        except asyncio.QueueFull:
            self.break_off(LinkBroken("slow", "the endpoint reads too slowly"))

    def break_off(self, why: LinkBroken) -> None:
        """End this epoch."""
        if not self._broken.done():
            self._broken.set_result(why)

    async def follow(self, call: Any) -> NoReturn:
        """Read and write until one of them ends or the epoch is broken off; raises what ended it.

        Whoever holds the error holds this stream, and the stream forgets the error.
        """
        try:
            await exchange(self._broken, self._read(call), self._write(call))
            raise LinkBroken("ended", "the stream ended")
        finally:
            call.cancel()
            self._broken = asyncio.get_running_loop().create_future()

    async def _read(self, call: Any) -> None:
        allowance = TimeAllowance()
        while True:
            data = await call.read()
            if data is grpc.aio.EOF:
                await raise_status(call)
            begin = time.thread_time()
            self._deliver(parse_response(data))
            if not allowance.spend(MESSAGE_SECONDS + time.thread_time() - begin):
                raise EndpointMisfit("flood", "the endpoint floods")
            while self._backlog() > CALM:
                await asyncio.sleep(0.002)

    def _deliver(self, message: pb.SpeculateResponse) -> None:
        kind = message.WhichOneof("message")
        if kind is None and is_newer(message):
            self._report.unknown += 1
            return
        if kind != "frames":
            raise EndpointMisfit("protocol", "the endpoint sent a message that is no frames")
        if message.frames.epoch != self._epoch:
            return
        try:
            decoded = decode_draft_frames(message.frames)
        except InputError as error:
            raise EndpointMisfit("protocol", f"the endpoint broke the protocol: {error}") from None
        self._report.unknown += decoded.unknown
        self._to_engine(DraftFrames(self._link, self._epoch, decoded.frames, decoded.load))
        if any(isinstance(f, Notice) and f.kind is NoticeKind.LEAVING for f in decoded.frames):
            # The engine moves its sequences; the endpoint waits for nothing but our farewell.
            raise LinkBroken("leaving", "the endpoint leaves")

    async def _write(self, call: Any) -> None:
        while True:
            frames = await self._outbox.get()
            while not self._outbox.empty():
                frames += self._outbox.get_nowait()
            for part in in_messages(frames):
                await call.write(encode_target_frames(self._epoch, part))


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
    options = 16 * len(frame.sampling.logit_bias) + 4 * len(frame.sampling.banned)
    if frame.sampling.grammar is not None:
        options += len(frame.sampling.grammar.source)
    return 256 + len(frame.prompt) + len(frame.output) + options
