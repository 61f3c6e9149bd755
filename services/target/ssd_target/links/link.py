"""A link to one speculation endpoint: a stream that is made again whenever it breaks."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from ssd.v1 import speculation_pb2 as pb
from ssd_engine.errors import ConfigError
from ssd_engine.process.addresses import host_of
from ssd_engine.speculation.frames import TargetFrame
from ssd_serving.rpc.speculator_kinds import kind_name
from ssd_target.links.draft_credentials import DraftCredentials
from ssd_target.links.endpoint_addresses import EndpointAddress
from ssd_target.links.frame_stream import FrameStream
from ssd_target.links.handshake import Agreed, TargetIdentity, shake_hands
from ssd_target.links.link_errors import EndpointMisfit, LinkBroken, link_broken
from ssd_target.links.link_report import LinkReport
from ssd_target.links.link_state import DraftLinkEvent, DraftLinkState, transition
from ssd_target.records.engine_records import DraftLinkDown, DraftLinkUp

BREAKS = (LinkBroken, ConfigError, OSError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
SPECULATE = "/ssd.v1.SpeculationService/Speculate"
BACK_OFF = (0.1, 2.0)  # first and longest pause between tries, in seconds
MISFIT_PAUSE = 30.0
STEADY_SECONDS = 5.0  # up for so long, a link's earlier failures are forgotten
log = logging.getLogger(__name__)

MAX_BYTES = 4 * 1024 * 1024  # the largest message from an endpoint
FORGET_SECONDS = 60.0  # after which one that is down and not named again makes room


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
        self.report = LinkReport(number, place.address)
        self.epoch = 0
        self._clock = clock
        self.last_named = clock()
        self._identity, self._credentials = identity, credentials
        self._to_engine, self._backlog, self._on_failure = to_engine, backlog, on_failure
        self._stream: FrameStream | None = None  # of this epoch
        self._pause = BACK_OFF[0]

    def send(self, epoch: int, frames: list[TargetFrame]) -> None:
        """A put; never waits."""
        if self.state is DraftLinkState.UP and epoch == self.epoch and self._stream is not None:
            self._stream.send(frames)

    def break_off(self, epoch: int, why: LinkBroken) -> None:
        """End this epoch."""
        if epoch == self.epoch and self._stream is not None:
            self._stream.break_off(why)

    def name_again(self) -> None:
        """A request has named it."""
        self.last_named = self._clock()

    async def run(self) -> None:
        """Until cancelled; without a use for it, until it fails. After an error that nobody foresaw
        it is down, and may be run again."""
        try:
            await self._run()
        except Exception as error:
            self._break_down(error)
            raise
        except asyncio.CancelledError:
            self.state = transition(self.state, DraftLinkEvent.CLOSE)
            raise
        self.state = transition(self.state, DraftLinkEvent.CLOSE)

    async def _run(self) -> None:
        if self.state is not DraftLinkState.CONNECTING:
            self.state = transition(self.state, DraftLinkEvent.RETRY)
        while not (self.left or self._is_forgotten):
            event = await self._one_epoch()
            self.state = transition(self.state, event)
            if self.left:
                return
            pause = MISFIT_PAUSE if event is DraftLinkEvent.MISFIT else self._pause
            self._pause = min(2 * self._pause, BACK_OFF[1])
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))
            self.state = transition(self.state, DraftLinkEvent.RETRY)

    def _break_down(self, error: Exception) -> None:
        if self.state in (DraftLinkState.CONNECTING, DraftLinkState.UP):
            self.state = transition(self.state, DraftLinkEvent.FAIL)
        self.report.down(LinkBroken("internal", f"an error here, not there: {error!r}"))

    @property
    def _is_forgotten(self) -> bool:
        return self.named and self._clock() - self.last_named > FORGET_SECONDS

    async def _one_epoch(self) -> DraftLinkEvent:
        """Connect and follow the stream to its end."""
        self.epoch += 1
        self._stream = FrameStream(
            self.number, self.epoch, self._to_engine, self._backlog, self.report
        )
        try:
            async with self._channel() as channel:
                speculate = channel.stream_stream(
                    SPECULATE, request_serializer=pb.SpeculateRequest.SerializeToString
                )
                shown = self._credentials.metadata(host_of(self.address))
                await self._follow(speculate(metadata=shown), self._stream)
        except BREAKS as error:
            return self._failed(link_broken(error))
        finally:
            self._stream = None
            if self.state is DraftLinkState.UP:
                self._to_engine(DraftLinkDown(self.number, self.epoch))

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

    async def _follow(self, call: Any, stream: FrameStream) -> NoReturn:
        hides_rows = self._credentials.hides_rows(host_of(self.address))
        identity = self._identity.on_this_host() if hides_rows else self._identity
        self._up(await shake_hands(call, identity, self.epoch, self.trusted))
        if hides_rows:
            log.info(
                "link to %s has TLS, and tensor planes have none: rows go by shared memory, or not "
                "at all (--insecure-plane)",
                self.address,
            )
        proof = asyncio.get_running_loop().call_later(STEADY_SECONDS, self._has_proved_steady)
        try:
            await stream.follow(call)
        finally:
            proof.cancel()

    def _up(self, agreed: Agreed) -> None:
        welcome = agreed.welcome
        self.state = transition(self.state, DraftLinkEvent.WELCOME)
        self.report.up(welcome.draft_name, kind_name(welcome.speculator))
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
                agreed.features,
            )
        )

    def _has_proved_steady(self) -> None:
        """One that comes up only to fail again is tried less."""
        self._pause = BACK_OFF[0]
        self.report.steady()

    def _failed(self, why: LinkBroken) -> DraftLinkEvent:
        self.report.down(why)
        self._on_failure(self)
        return DraftLinkEvent.MISFIT if isinstance(why, EndpointMisfit) else DraftLinkEvent.FAIL
