"""How a client reaches guarded services: over TLS, with a certificate or a token of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import grpc

from ssd_client.errors import BadInputError

Options = Sequence[tuple[str, Any]]  # options of a gRPC channel
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])")


@dataclass(frozen=True)
class Security:
    """How to connect. Without any setting, connections are plain, as on one's own host."""

    tls: bool = False
    ca: bytes | None = None  # None: the system's
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False  # a token may travel in the clear

    def channel(
        self, address: str, options: Options, server_name: str | None = None
    ) -> grpc.Channel:
        """`server_name`: whom to expect there, unless the user has said it."""
        shown = self.metadata(address)
        channel = self._open(grpc, address, options, server_name)
        return grpc.intercept_channel(channel, _Bearer(shown)) if shown else channel

    def async_channel(
        self, address: str, options: Options, server_name: str | None = None
    ) -> grpc.aio.Channel:
        """The same for asyncio; the token goes with every call, as `metadata`."""
        self.metadata(address)  # whether it may be shown
        return self._open(grpc.aio, address, options, server_name)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What every call shows of the token, if there is one."""
        if self.token is None:
            return ()
        if not (self.tls or self.insecure or is_loopback(_host(address))):
            raise BadInputError(
                f"--token-file: the token would travel in the clear to {address}; "
                "give --tls-ca or --tls, or say --insecure"
            )
        return (("authorization", f"Bearer {self.token}"),)

    def _open(self, kind: Any, address: str, options: Options, server_name: str | None) -> Any:
        """A channel of `kind`, grpc or grpc.aio, over TLS where there is any."""
        # A proxy from the environment is for other machines, not for this one.
        proxy = [("grpc.enable_http_proxy", 0)] if is_loopback(_host(address)) else []
        chosen = [*options, *proxy]
        if not self.tls:
            return kind.insecure_channel(address, options=chosen)
        expected = self.server_name or server_name
        if expected is not None:
            chosen.append(("grpc.ssl_target_name_override", expected))
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        return kind.secure_channel(address, credentials, options=chosen)

    def for_named_by_others(self) -> Security:
        """Security for addresses that a server named, not the user: whoever has no certificate of
        the user's own authority gets no token."""
        return self if self.ca is not None else replace(self, token=None)


PLAIN = Security()


def _host(address: str) -> str:
    return address.rsplit(":", 1)[0]


def is_loopback(host: str) -> bool:
    return _LOOPBACK.fullmatch(host) is not None


# Details of a call that an interceptor passes on; gRPC offers no class for them.
_DETAILS = ("method", "timeout", "credentials", "wait_for_ready", "compression")


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Shows the token with every call."""

    def __init__(self, shown: Sequence[tuple[str, str]]) -> None:
        self._shown = shown

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), *self._shown]
        same = {name: getattr(details, name) for name in _DETAILS}
        return continuation(SimpleNamespace(**same, metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = _intercept
    intercept_stream_unary = intercept_stream_stream = _intercept
