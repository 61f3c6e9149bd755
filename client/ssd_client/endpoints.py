"""Endpoints: an address, its channel, and the stubs that speak over it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc

from ssd.v1 import (
    speculation_pb2,
    speculation_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    trace_pb2_grpc,
)
from ssd_client.errors import failure_of
from ssd_client.security import PLAIN, Security

DEFAULT_ADDRESS = "127.0.0.1:7410"

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_OPTIONS = [
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

    def __init__(self, address: str, security: Security = PLAIN) -> None:
        self.address = check_address(address)
        self.security = security
        self._channel = security.channel(address, _OPTIONS)
        self.target = target_pb2_grpc.TargetServiceStub(self._channel)
        self.draft = speculation_pb2_grpc.SpeculationServiceStub(self._channel)
        self.trace = trace_pb2_grpc.TraceServiceStub(self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)

    def model_info(self, timeout_s: float) -> target_pb2.GetModelInfoResponse:
        try:
            return self.target.GetModelInfo(target_pb2.GetModelInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure_of(error, self.address, admitted=False) from error

    def draft_info(self, timeout_s: float) -> speculation_pb2.GetDraftInfoResponse:
        try:
            return self.draft.GetDraftInfo(speculation_pb2.GetDraftInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure_of(error, self.address, admitted=False) from error

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def connect(addresses: Sequence[str], security: Security = PLAIN) -> Iterator[list[Endpoint]]:
    """The endpoints of `addresses`, closed at the end."""
    with contextlib.ExitStack() as stack:
        endpoints = (Endpoint(each, security) for each in addresses)
        yield [stack.enter_context(contextlib.closing(each)) for each in endpoints]


def check_address(address: str) -> str:
    """`address` if it is HOST:PORT, else a ValueError that says what it should be."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return address
