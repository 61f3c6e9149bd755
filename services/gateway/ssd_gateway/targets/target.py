"""One target: its channel, what it says of itself, and what this gateway has in flight there."""

import asyncio
import math
import time
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc, trace_pb2_grpc
from ssd_client.connection.endpoints import CHANNEL_OPTIONS
from ssd_client.connection.security import Security
from ssd_client.errors import ClientError, failure_of

ASK_SECONDS = 2.0
AVOIDED_SECONDS = 60.0  # once a stream has stood still there; readiness follows its engine later
LONGEST_CALL = 86_400.0  # calls that run when a channel is replaced may go on so long
KEY_STATUSES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
Metadata = tuple[tuple[str, str], ...]


class Target:
    def __init__(self, address: str, server_name: str | None, security: Security) -> None:
        """``server_name``: whom to expect there, where it is not the host of the address."""
        self.address, self.server_name, self._security = address, server_name, security
        self.info: pb.GetModelInfoResponse | None = None  # the last one
        self.wants_key = False  # to say what it serves, and the gateway has none that is good
        self.ready = False
        self.problem = "not asked yet"
        self.in_flight = 0
        self._stood_still_at = -math.inf
        self.generation = 0  # counts its connections
        self._closing: set[asyncio.Task[None]] = set()
        self._connect()

    def _connect(self) -> None:
        self.generation += 1
        # A pool of its own: a channel that is made anew gets a connection of its own, too.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = self._security.async_channel(self.address, options, self.server_name)
        self.stub = target_pb2_grpc.TargetServiceStub(self._channel)
        self.trace = trace_pb2_grpc.TraceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def reconnect(self, generation: int) -> None:
        """Takes a new connection: behind one address there may be several servers, and the one that
        connection ``generation`` leads to is leaving. Calls that run go on."""
        if generation == self.generation:
            left = asyncio.ensure_future(self._channel.close(LONGEST_CALL))
            self._closing.add(left)
            left.add_done_callback(self._closing.discard)
            self._connect()

    @property
    def load(self) -> int:
        """Requests that are there, as far as it is known."""
        told = 0 if self.info is None else self.info.load.running + self.info.load.waiting
        return max(told, self.in_flight)

    @property
    def room(self) -> int:
        """Requests that run there at a time."""
        return 1 if self.info is None else max(1, self.info.max_num_seqs)

    @property
    def answers(self) -> bool:
        """True if the last look at it was answered."""
        return self.ready

    @property
    def avoided(self) -> bool:
        """True if others are asked first: a stream stood still here a moment ago."""
        return time.monotonic() - self._stood_still_at < AVOIDED_SECONDS

    def stood_still(self) -> None:
        """A stream has left."""
        self._stood_still_at = time.monotonic()

    def serves(self, model: str | None) -> bool:
        return model is None or self.info is None or self.info.name == model

    async def ask(
        self, call: Any, request: Message, metadata: Metadata, seconds: float = ASK_SECONDS
    ) -> Any:
        """The answer to one call of the stubs; a ClientError where there is none."""
        try:
            return await call(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            raise failure_of(error, self.address, admitted=False) from error

    async def refresh(self, metadata: Metadata) -> None:
        """Looks whether it is ready, and what it does now."""
        ready = health_pb2.HealthCheckRequest(service="readiness")
        try:
            answer = await self.ask(self._health.Check, ready, ())
        except ClientError as error:
            self.ready, self.problem = False, str(error)
            return
        self.ready = answer.status == health_pb2.HealthCheckResponse.SERVING
        self.problem = "" if self.ready else "it starts or stops"
        try:
            about = pb.GetModelInfoRequest()
            self.info = await self.ask(self.stub.GetModelInfo, about, metadata)
            self.wants_key = False
        except ClientError as error:  # it may want a key, which callers have
            self.wants_key = self.wants_key or error.status in KEY_STATUSES
            self.problem = self.problem or str(error)

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await self._channel.close()
