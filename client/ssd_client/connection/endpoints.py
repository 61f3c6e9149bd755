"""Endpoints: an address, its channel, and the stubs that speak over it.

A name, dns:///NAME:PORT, stands for all addresses behind it, each an endpoint of its own; it is
looked up again when all of them were lost.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import (
    speculation_pb2,
    speculation_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    trace_pb2_grpc,
)
from ssd_client.connection.security import PLAIN, Security
from ssd_client.errors import BadInputError, EndpointLostError, failure_of

DEFAULT_ADDRESS = "127.0.0.1:7410"
DNS = "dns:///"
MAX_ADDRESSES = 64  # behind a name
_KEPT_CHANNELS = 8  # channels that an endpoint keeps for the calls that run on them
_MAX_ENDPOINTS = 256  # endpoints of a command, however often its names are looked up

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed within 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Another endpoint may be waiting: give up connecting early, and look again soon.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Za-z:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


class Endpoint:
    """One service, a target or a draft. Connects with its first call."""

    ready = True  # nobody asks before it is called
    answers = False

    def __init__(
        self, address: str, server_name: str | None = None, security: Security = PLAIN
    ) -> None:
        """`server_name`: whom to expect there, where it is not the host of the address."""
        self.address = check_address(address)
        self.security = security
        self.server_name = server_name
        self._channels: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self.generation = 0  # counts its connections
        self._connect()

    def _connect(self) -> None:
        self.generation += 1
        # A pool of its own: a channel that is made anew gets a connection of its own, too.
        pool = [("grpc.use_local_subchannel_pool", 1)] if self._channels else []
        channel = self.security.channel(self.address, [*CHANNEL_OPTIONS, *pool], self.server_name)
        self._channels.append(channel)
        self.target = target_pb2_grpc.TargetServiceStub(channel)
        self.draft = speculation_pb2_grpc.SpeculationServiceStub(channel)
        self.trace = trace_pb2_grpc.TraceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def reconnect(self, generation: int) -> None:
        """What comes next goes over a new connection: behind one address there may be several
        servers, and the one that this connection leads to is leaving. Calls that run go on.

        `generation`: the one that was left; whoever comes second changes nothing.
        """
        with self._lock:
            if generation == self.generation:
                self._connect()
            for channel in self._channels[:-_KEPT_CHANNELS]:
                channel.close()
            del self._channels[:-_KEPT_CHANNELS]

    def model_info(self, timeout_s: float) -> target_pb2.GetModelInfoResponse:
        return self.ask(self.target.GetModelInfo, target_pb2.GetModelInfoRequest(), timeout_s)

    def draft_info(self, timeout_s: float) -> speculation_pb2.GetDraftInfoResponse:
        request = speculation_pb2.GetDraftInfoRequest()
        return self.ask(self.draft.GetDraftInfo, request, timeout_s)

    def ask(self, call: Callable[..., Any], request: Message, timeout_s: float) -> Any:
        """The answer to one call of this endpoint's stubs; a ClientError where there is none."""
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure_of(error, self.address, admitted=False) from error

    def readiness(self, timeout_s: float) -> str:
        """ "ready" or "not ready"; the status code where the service does not say it."""
        request = health_pb2.HealthCheckRequest(service="readiness")
        try:
            answer = self.health.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name).lower()
        ready = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "ready" if ready else "not ready"

    def close(self) -> None:
        with self._lock:
            for channel in self._channels:
                channel.close()


class Endpoints(Sequence[Endpoint]):
    """The endpoints behind the addresses and names that a user gave, in their order. The list only
    grows."""

    def __init__(
        self,
        named: Sequence[str],
        security: Security = PLAIN,
    ) -> None:
        self._named = list(named)
        for each in self._named:
            if not isinstance(each, str):
                raise BadInputError(
                    f"targets: HOST:PORT is expected, one argument each; got {each!r}"
                )
        self._security = security
        self._endpoints: list[Endpoint] = []
        self._known: set[str] = set()
        self._failed = ("", "")  # the name that was looked up last in vain, and why
        self._lock = threading.Lock()
        self._fill()
        if named and not self._endpoints:
            raise EndpointLostError(self._failed[0], self._failed[1])

    def look_again(self) -> None:
        """Adds the addresses that names have got; those that are known stay."""
        if any(each.startswith(DNS) for each in self._named):
            with self._lock:
                self._fill()

    def _fill(self) -> None:
        for each in self._named:
            for address, server_name in self._addresses(each):
                if address not in self._known and len(self._endpoints) < _MAX_ENDPOINTS:
                    self._known.add(address)
                    self._endpoints.append(Endpoint(address, server_name, self._security))

    def _addresses(self, named: str) -> list[tuple[str, str | None]]:
        """Addresses, in random order where they are behind a name: clients spread over them."""
        if not named.startswith(DNS):
            return [(named, None)]
        host, _, port = named.removeprefix(DNS).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            found = resolve_host(host, int(port))[:MAX_ADDRESSES]
        except OSError as error:
            self._failed = (named, f"cannot look it up: {error.strerror or error}")
            return []
        random.shuffle(found)
        return [(address, host) for address in found]

    @overload
    def __getitem__(self, index: int) -> Endpoint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Endpoint]: ...
    def __getitem__(self, index: int | slice) -> Endpoint | Sequence[Endpoint]:
        return self._endpoints[index]

    def __len__(self) -> int:
        return len(self._endpoints)

    def close(self) -> None:
        for each in self._endpoints:
            each.close()


@contextlib.contextmanager
def connect(named: Sequence[str], security: Security = PLAIN) -> Iterator[Endpoints]:
    """The endpoints of addresses and names, closed at the end."""
    with contextlib.closing(Endpoints(named, security)) as endpoints:
        yield endpoints


@contextlib.contextmanager
def connect_one(named: str, security: Security = PLAIN) -> Iterator[Endpoint]:
    """The endpoint of an address, or one of those behind a name."""
    with connect([named], security) as endpoints:
        yield endpoints[0]


def linked_drafts(info: target_pb2.GetModelInfoResponse) -> dict[str, str | None]:
    """Addresses of a target's drafts as it knows them, and whom to expect there: the name behind
    which it found them. None stands for the address's own host."""
    return {each.address: _name_of(each.source) for each in info.speculation_endpoints}


def _name_of(source: str) -> str | None:
    if not source.startswith(DNS):
        return None
    host = source.removeprefix(DNS).rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def resolve_host(host: str, port: int) -> list[str]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(address[0]) for *_, address in answers)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


def check_address(address: str) -> str:
    """`address` if it is HOST:PORT, else a ValueError that says what it should be."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return address


def check_target(text: str) -> str:
    """`text` if it is HOST:PORT or dns:///NAME:PORT, else a ValueError."""
    try:
        check_address(text.removeprefix(DNS))
    except ValueError:
        raise ValueError(f"{text!r} is not HOST:PORT or {DNS}NAME:PORT") from None
    return text
