"""Typed errors become gRPC statuses here, and nowhere else."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from ssd_engine.errors import InputError, SSDError
from ssd_serving.engine.client import EngineGone
from ssd_serving.files.reloading import Outdated

DETAILS_KEY = "grpc-status-details-bin"
ABORT_SECONDS = 5.0  # for a client to take its status
MAX_TEXT = 1024


class NotServing(SSDError):
    """Loading or draining: another endpoint, or a later try, may serve."""

    def __init__(self, message: str, retry_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class HandedOver(NotServing):
    """The request was taken on and not finished here: another endpoint can go on from there."""


class ServerFull(SSDError):
    """Admission refused; says when a new try makes sense."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ReaderStalled(SSDError):
    """The client reads nothing: it would hold its place for ever."""


class ReaderBehind(SSDError):
    """The client reads, but so slowly that what waits for it would fill our memory."""


class PeerSilent(SSDError):
    """A peer did not say in time what it has to say first."""


class Unauthenticated(SSDError):
    """It is not known who calls."""


class NotAllowed(SSDError):
    """The caller is known, and may not do this."""


class NoSuchMethod(SSDError):
    """There is no such method here: the caller has a wrong address, or tries all methods."""


class RequestFailed(SSDError):
    """This request failed inside the engine; others are not touched."""


_CODES: dict[type[SSDError], grpc.StatusCode] = {
    InputError: grpc.StatusCode.INVALID_ARGUMENT,
    ServerFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotServing: grpc.StatusCode.UNAVAILABLE,
    HandedOver: grpc.StatusCode.UNAVAILABLE,
    EngineGone: grpc.StatusCode.UNAVAILABLE,
    Outdated: grpc.StatusCode.UNAVAILABLE,
    ReaderStalled: grpc.StatusCode.DEADLINE_EXCEEDED,
    ReaderBehind: grpc.StatusCode.DEADLINE_EXCEEDED,
    PeerSilent: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    NoSuchMethod: grpc.StatusCode.UNIMPLEMENTED,
    RequestFailed: grpc.StatusCode.INTERNAL,
}


_OTHERS = grpc.StatusCode.FAILED_PRECONDITION  # two peers that do not fit


def code_of(error: SSDError) -> grpc.StatusCode:
    return _CODES.get(type(error), _OTHERS)


def refusal_codes(but: Sequence[type[SSDError]]) -> list[grpc.StatusCode]:
    """Codes that a call can end with, but for these errors."""
    found = {code: None for kind, code in _CODES.items() if kind not in but}
    return [*found, _OTHERS]


def for_log(error: SSDError) -> str:
    """An error may quote the request: of a wrong field only its name is said."""
    return f"wrong field {error.field}" if isinstance(error, InputError) else str(error)


async def abort(context: grpc.aio.ServicerContext, error: SSDError) -> NoReturn:
    """A client that reads nothing does not take its status either: nobody waits for that. What ends
    the call has the error as its cause."""
    code = code_of(error)
    detail, message = _detail(error), _cut(str(error))
    trailing = () if detail is None else ((DETAILS_KEY, _rich(code, message, detail)),)
    try:
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(code, message, trailing)
    except grpc.aio.AbortError as end:
        raise end from error
    except TimeoutError:
        raise asyncio.CancelledError from error
    raise RuntimeError("abort returns never")


def _cut(text: str) -> str:
    """Errors may quote the request; trailers have a hard limit."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _detail(error: SSDError) -> Message | None:
    if isinstance(error, InputError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_cut(error.problem), reason=error.reason
        )
        return error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, ServerFull | NotServing):
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(int(error.retry_seconds * 1000))
        return info
    return None


def _rich(code: grpc.StatusCode, message: str, detail: Message) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = status_pb2.Status(
        code=code_pb2.Code.Value(code.name), message=message, details=[packed]
    )
    return status.SerializeToString()
