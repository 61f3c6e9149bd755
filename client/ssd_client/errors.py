"""What can go wrong, in words for a person, and the exit code that goes with it.

`failure_of` is the only place that reads gRPC status codes.
"""

from __future__ import annotations

import re

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ssd_client.printable import printable

# Codes that say "your request is at fault": another endpoint would answer the same.
_BAD_INPUT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}

# What gRPC writes into INTERNAL and UNKNOWN when it was the connection that broke.
_BROKEN_CONNECTION = (
    "rst_stream",
    "stream removed",
    "socket closed",
    "connection reset",
    "connection aborted",
    "broken pipe",
    "goaway",
    "transport closed",
)

TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"  # a request that the context has no room for

_CONNECT_ERROR = re.compile(r"Failed to connect to remote host: (?:\w+: )?(.*?)(?: \(\d+\))?$")


class ClientError(Exception):
    """Ends the command with one line on stderr."""

    exit_code = 1
    status: grpc.StatusCode | None = None  # the server's, where one has answered
    field = ""  # the field of the request that is at fault, as the server names it
    field_reason = ""  # why, for programs; TOO_LONG


class BadInputError(ClientError):
    """The request itself cannot be served, here or elsewhere."""

    exit_code = 2


class DeadlineError(ClientError):
    """The time given to the whole request is over."""


class ModelMismatchError(ClientError):
    """The endpoint to resume on serves another model: its text would not be the first one's."""


class EndpointLostError(ClientError):
    """The endpoint cannot be reached, or went away before the request was finished."""

    def __init__(self, address: str, reason: str, tokens: int = 0, hint: str = "") -> None:
        where = f"{address} lost after {count(tokens, 'token')}"
        super().__init__(f"{where} ({reason}){hint}" if tokens else f"{address}: {reason}")
        self.address = address
        self.reason = reason


class EndpointStalledError(EndpointLostError):
    """Nothing came from the endpoint for too long, and another one may go on."""


class EndpointFailedError(ClientError):
    """The endpoint could not serve the request, by its own fault: another one may."""


class EndpointFullError(ClientError):
    """The endpoint did not admit the request; `retry_delay_s` is its advice, if it gave one."""

    def __init__(self, message: str, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class EndpointLeavingError(ClientError):
    """The endpoint starts or stops, and says when to come again: the request is better elsewhere,
    or here after `retry_delay_s`."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


def failure_of(error: grpc.RpcError, address: str, *, admitted: bool) -> ClientError:
    """Says what a failed call means. `admitted`: the endpoint had answered before it failed."""
    failure = _classify(error, address, admitted)
    found = _detail(error, error_details_pb2.BadRequest())
    failure.status = error.code()
    if found and found.field_violations:
        failure.field = found.field_violations[0].field
        failure.field_reason = found.field_violations[0].reason
    return failure


def _classify(error: grpc.RpcError, address: str, admitted: bool) -> ClientError:
    code = error.code()
    message = _message(error)
    if code in _BAD_INPUT:
        return BadInputError(message)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{address}: {message}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _exhausted(error, f"{address}: {message}", admitted)
    if code == grpc.StatusCode.UNAVAILABLE and (delay_s := _retry_delay_s(error)) is not None:
        return EndpointLeavingError(f"{address}: {message}", delay_s)
    if _is_lost(code, message):
        return EndpointLostError(address, message)
    if code == grpc.StatusCode.INTERNAL:
        return EndpointFailedError(f"{address}: {message}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ClientError(f"{address} does not serve this call, is it a target? ({message})")
    return ClientError(f"{address}: {message}")


def _is_lost(code: grpc.StatusCode, message: str) -> bool:
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return any(mark in message.lower() for mark in _BROKEN_CONNECTION)
    # A cancellation of our own never gets here: after it, nothing is read any more.
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _exhausted(error: grpc.RpcError, message: str, admitted: bool) -> ClientError:
    if "larger than max" in message:  # gRPC's own limit on a message, not a full endpoint
        return BadInputError(message)
    if admitted:
        return ClientError(message)
    return EndpointFullError(message, _retry_delay_s(error))


def _message(error: grpc.RpcError) -> str:
    """The server's message on one line; from the field violations where there is none."""
    text = error.details() or "; ".join(_violations(error)) or error.code().name
    text = " ".join(printable(text).split())
    connect_error = _CONNECT_ERROR.search(text)
    return f"cannot connect: {connect_error[1]}" if connect_error else text


def _violations(error: grpc.RpcError) -> list[str]:
    found = _detail(error, error_details_pb2.BadRequest())
    if found is None:
        return []
    return [f"{each.field}: {each.description}" for each in found.field_violations]


def _retry_delay_s(error: grpc.RpcError) -> float | None:
    found = _detail(error, error_details_pb2.RetryInfo())
    if found is None:
        return None
    return max(0.0, found.retry_delay.seconds + found.retry_delay.nanos / 1e9)


# The message is of a type that mypy does not see: google.rpc has no stubs here.
def _detail(error: grpc.RpcError, message):  # type: ignore[no-untyped-def]
    """Fills `message` from the details of a status; None where there is none of its type."""
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Unpack(message):
                return message
    except (ValueError, DecodeError):  # details that contradict the status, or no protobuf
        pass
    return None


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
