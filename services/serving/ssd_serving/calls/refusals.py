"""Who was refused, and why: a warning with the peer's address, and a count.

Addresses are no labels of metrics, for there is no end of them; and whoever is refused without end
has few lines in the log (``sparse_log.py``). gRPC refuses some by itself, of which nobody here
hears: handshakes that fail, connections and calls beyond its bounds, compressed requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool

from ssd_engine.errors import SSDError
from ssd_engine.process.sparse_log import SparseLog
from ssd_serving.calls.health_port import caller_of
from ssd_serving.engine.client import EngineGone
from ssd_serving.rpc.status import (
    HandedOver,
    NoSuchMethod,
    RequestFailed,
    abort,
    code_of,
    for_log,
    refusal_codes,
)

NO_REFUSALS = (EngineGone, HandedOver, RequestFailed)  # errors of calls that had been let in
REASONS = tuple(code.name.lower() for code in refusal_codes(NO_REFUSALS))
OTHER = "other"  # method: one that is not served here
MAX_METHOD = 100  # characters of one, in the log
Caller = Callable[[grpc.aio.ServicerContext], str]
Behaviour = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]
OnRefusal = Callable[[str, str], None]


class ReportRefusals(grpc.aio.ServerInterceptor):
    """The outermost interceptor: it sees how every call ends."""

    def __init__(
        self,
        caller: Caller = lambda context: "",
        on_refusal: OnRefusal = lambda method, reason: None,
    ) -> None:
        """``caller``: its name, as far as it is known. ``on_refusal`` gets a method and one of
        REASONS."""
        self._caller = caller
        self._on_refusal = on_refusal
        self._sparse = SparseLog()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return self._reporting(_no_such_method, details.method, OTHER, None)
        name, serializer = details.method.rpartition("/")[2], handler.response_serializer
        # Further inside, every method is served as one with streams (request_interceptor.py).
        return self._reporting(handler.stream_stream, details.method, name, serializer)

    def _reporting(
        self, behaviour: Behaviour, method: str, name: str, serializer: Any
    ) -> grpc.RpcMethodHandler:
        async def serve(requests: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                await behaviour(requests, context)
            except (grpc.aio.AbortError, asyncio.CancelledError) as end:
                if isinstance(end.__cause__, SSDError):
                    self._report(method, name, context, end.__cause__)
                raise

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=serializer)

    def _report(
        self, method: str, name: str, context: grpc.aio.ServicerContext, error: SSDError
    ) -> None:
        if isinstance(error, NO_REFUSALS):
            return
        code = code_of(error).name
        self._on_refusal(name, code.lower())
        peer, caller = caller_of(context.peer()), self._caller(context)
        about = {
            "peer": shown_peer(peer),
            "method": _printable(method[:MAX_METHOD]),
            "code": code,
            "reason": _printable(for_log(error)),
        }
        if caller:
            about["identity"] = caller
        who = f" ({caller!r})" if caller else ""
        text = f"refused {about['peer']}{who}: {about['method']}: {code}: {about['reason']}"
        self._sparse.warning((name, code), text, host_of(peer), about)


def methods_of(services: Iterable[str]) -> list[str]:
    """Names of their methods, for metrics."""
    pool = descriptor_pool.Default()
    found = [method.name for name in services for method in pool.FindServiceByName(name).methods]
    return [*found, OTHER]


def host_of(peer: str) -> str:
    """The part without the port of what gRPC calls the other side: ipv4:127.0.0.1:5000."""
    return peer.rpartition(":")[0]


def shown_peer(peer: str) -> str:
    """127.0.0.1:5000, [::1]:5000; whatever is no such address, as gRPC says it."""
    kind, _, place = unquote(peer).partition(":")
    return _printable(place if kind in ("ipv4", "ipv6") else peer)


def _printable(text: str) -> str:
    """Callers choose some of it: it stays on its line, and in its terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


async def _no_such_method(_: Any, context: grpc.aio.ServicerContext) -> None:
    await abort(context, NoSuchMethod("there is no such method here"))
