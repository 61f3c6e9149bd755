"""Who may call what. Asked before any method sees a call; what is not named here is for admins."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from ssd_engine.errors import SSDError
from ssd_engine.process.secret_files import warn_of_readers
from ssd_serving.files.reloading import Outdated, Reloading
from ssd_serving.rpc.status import NotAllowed, Unauthenticated, abort
from ssd_serving.security.allowances import Identity
from ssd_serving.security.tokens import Role, Token, find_token, load_tokens

OPEN = ("grpc.health.v1.Health",)  # says nothing but up or down
ROLES = {"ssd.v1.TargetService": Role.GENERATE, "ssd.v1.SpeculationService": Role.SPECULATE}
SCHEME = "bearer "
ANONYMOUS = Identity("anonymous")
Metadata = Sequence[tuple[str, str | bytes]]


class Access:
    """Without a token file everybody who can connect may do everything."""

    def __init__(
        self,
        token_file: Path | None = None,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_reload_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_refusal`` gets one of: missing, unknown, expired, role, outdated."""
        self._on_refusal = on_refusal
        self._tokens: Reloading[tuple[Token, ...]] | None = None
        if token_file is not None:
            self._tokens = Reloading(
                [token_file],
                lambda: load_tokens(token_file),
                on_reload_failure,
                closes=True,
                on_change=lambda: warn_of_readers("--token-file", token_file),
            )

    def check(self, method: str, metadata: Metadata) -> None:
        """Raise Unauthenticated or NotAllowed. ``method``: /package.Service/Method."""
        service = service_of(method)
        if self._tokens is None or service in OPEN:
            return
        try:
            token = self._token(metadata)
        except Outdated:
            self._on_refusal("outdated")
            raise
        role = ROLES.get(service, Role.ADMIN)
        if not token.allows(role):
            self._on_refusal("role")
            raise NotAllowed(f"the token of {token.name!r} has not the role {role.value}")

    def identity(self, context: grpc.aio.ServicerContext) -> Identity:
        """The identity of a call that was let through."""
        if self._tokens is not None:
            token = self._token(context.invocation_metadata() or ())
            return Identity(token.name, token.allowance)
        name = _common_name(context)
        return Identity(name) if name else ANONYMOUS

    def holder(self, context: grpc.aio.ServicerContext) -> str:
        """Whose share a call takes: that of its identity, or of its host where that is nobody."""
        identity = self.identity(context)
        return (
            unquote(context.peer()).rpartition(":")[0] if identity is ANONYMOUS else identity.name
        )

    def name_of(self, context: grpc.aio.ServicerContext) -> str:
        """Who calls, as far as that is known: a token that has expired has a name, too."""
        presented = _bearer(context.invocation_metadata() or ())
        if self._tokens is not None and presented is not None:
            with suppress(Outdated):
                token = find_token(self._tokens.get(), presented)
                if token is not None:
                    return token.name
        return _common_name(context)

    def _token(self, metadata: Metadata) -> Token:
        presented = _bearer(metadata)
        if presented is None:
            raise self._refuse("missing", "a token is needed: authorization: Bearer TOKEN")
        token = find_token(self._tokens.get() if self._tokens else (), presented)
        if token is None:
            raise self._refuse("unknown", "the token is not known here")
        if token.is_expired():
            raise self._refuse("expired", f"the token of {token.name!r} has expired")
        return token

    def _refuse(self, reason: str, message: str) -> Unauthenticated:
        self._on_refusal(reason)
        return Unauthenticated(message)


def service_of(method: str) -> str:
    return method.rpartition("/")[0].removeprefix("/")


def _common_name(context: grpc.aio.ServicerContext) -> str:
    """The name in the certificate that the client showed, if it did."""
    names = context.auth_context().get("x509_common_name") or (b"",)
    return str(names[0].decode(errors="replace"))


def _bearer(metadata: Metadata) -> str | None:
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(SCHEME):
            return value[len(SCHEME) :].strip()
    return None


class Guard(grpc.aio.ServerInterceptor):
    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        details = handler_call_details
        try:
            self._access.check(details.method, details.invocation_metadata or ())
        except SSDError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: grpc.RpcMethodHandler, error: SSDError) -> grpc.RpcMethodHandler:
    """A handler of the same kind that reads nothing of the call."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[handler.request_streaming, handler.response_streaming](refuse)
