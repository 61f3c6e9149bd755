"""How a client reaches guarded services: over TLS, with a certificate or a token of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import grpc

from ssd_client.errors import BadInputError

_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])")


@dataclass(frozen=True)
class Security:
    """Nothing of it is set: plain connections, as on one's own host."""

    tls: bool = False
    ca: bytes | None = None  # None: the system's
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False  # a token may travel in the clear

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], server_name: str | None = None
    ) -> grpc.Channel:
        """`server_name`: whom to expect there, unless the user has said it."""
        host = address.rsplit(":", 1)[0]
        # A proxy from the environment is for other machines, not for this one.
        proxy = [("grpc.enable_http_proxy", 0)] if is_loopback(host) else []
        expected = self.server_name or server_name
        channel = self._transport(address, [*options, *proxy], expected)
        if self.token is None:
            return channel
        if not (self.tls or self.insecure or is_loopback(host)):
            raise BadInputError(
                f"--token-file: the token would travel in the clear to {address}; "
                "give --tls-ca or --tls, or say --insecure"
            )
        return grpc.intercept_channel(channel, _Bearer(self.token))

    def _transport(
        self, address: str, options: list[tuple[str, Any]], expected: str | None
    ) -> grpc.Channel:
        if not self.tls:
            return grpc.insecure_channel(address, options=options)
        if expected is not None:
            options.append(("grpc.ssl_target_name_override", expected))
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        return grpc.secure_channel(address, credentials, options=options)

    def for_named_by_others(self) -> Security:
        """For addresses that no user wrote but a server named: whoever has no certificate of the
        user's own authority gets no token."""
        return self if self.ca is not None else replace(self, token=None)


PLAIN = Security()


def is_loopback(host: str) -> bool:
    return _LOOPBACK.fullmatch(host) is not None


class _Details(NamedTuple):
    """gRPC names these; it offers no class for them."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str]]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Shows the token with every call."""

    def __init__(self, token: str) -> None:
        self._shown = ("authorization", f"Bearer {token}")

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._shown]
        return continuation(
            _Details(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    intercept_unary_unary = intercept_unary_stream = _intercept
    intercept_stream_unary = intercept_stream_stream = _intercept
