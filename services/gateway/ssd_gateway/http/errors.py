"""Errors in OpenAI's shape: a status, and a body that names the field and the fix."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import grpc
import msgspec
from starlette.responses import Response

from ssd_client.errors import (
    TOO_LONG,
    ClientError,
    DeadlineError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
)
from ssd_engine.errors import SSDError
from ssd_engine.process.sparse_log import SparseLog
from ssd_serving.files.reloading import Outdated
from ssd_serving.rpc.status import NotAllowed, ServerFull, Unauthenticated

log = logging.getLogger(__name__)

INVALID, SERVER, LIMIT = "invalid_request_error", "server_error", "rate_limit_error"
# gRPC's own bound on a message: what was sent, and what is taken.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
_DOTTED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+")


# Of those that have no code of their own.
REASONS = {
    400: "invalid",
    403: "forbidden",
    404: "not_found",
    408: "too_slow",
    413: "request_too_large",
    415: "no_json",
    499: "gone",
    500: "failed",
    503: "no_target",
}
# How errors of calls begin: HOST:PORT of the target, which is no caller's business.
_ADDRESS = re.compile(r"^(?:\[[0-9a-fA-F:.%]+\]|[^\s:]+):\d+: ")
_sparse = SparseLog()


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorDetails


class ApiError(Exception):
    """Ends a request with a status and a body."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind, self.retry_after = kind, retry_after

    @property
    def reason(self) -> str:
        """One of a few, for metrics."""
        return self.code or REASONS.get(self.status, "other")

    def __reduce__(self) -> tuple[Any, ...]:
        about = (self.kind, self.param, self.code, self.retry_after)
        return ApiError, (self.status, str(self), *about)

    def body(self) -> ErrorAnswer:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 500:
            headers["x-should-retry"] = "false"
        return headers

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()), self.status, self.headers(), "application/json"
        )


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def api_error(error: Exception, params: Mapping[str, str] | None = None) -> ApiError:
    """What a failure on the way to a target, or in this process, means to the caller. ``params``:
    fields of this request, by the names that the targets' contract has for them."""
    match error:
        case ApiError():
            return error
        case ServerFull():
            return ApiError(
                429, str(error), LIMIT, code="rate_limit_exceeded", retry_after=error.retry_seconds
            )
        case Unauthenticated():
            return ApiError(401, str(error), code="invalid_api_key")
        case NotAllowed():
            return ApiError(403, str(error), code="insufficient_permissions")
        case Outdated():
            return ApiError(503, str(error), SERVER, retry_after=1.0)
        case EndpointFullError():
            return ApiError(
                429,
                _without_address(error),
                LIMIT,
                code="rate_limit_exceeded",
                retry_after=error.retry_delay_s or 1.0,
            )
        case EndpointLeavingError():
            return ApiError(503, _without_address(error), SERVER, retry_after=error.retry_delay_s)
        case EndpointLostError():
            return ApiError(503, "no target could take the request", SERVER, retry_after=1.0)
        case DeadlineError():
            return ApiError(504, _without_address(error), SERVER, code="timeout")
        case ClientError():
            return _of_status(error, params or {})
        case SSDError():
            return ApiError(500, str(error), SERVER)
    return ApiError(500, "the gateway failed; its log says why", SERVER)


def _without_address(error: ClientError) -> str:
    return _ADDRESS.sub("", str(error))


def log_failure(what: str, error: Exception, problem: ApiError) -> None:
    """For whoever runs the gateway: callers are not told which target failed, and how."""
    if problem.status == 500:
        log.error("%s failed: %s", what, error, exc_info=not isinstance(error, ApiError))
    elif isinstance(error, ClientError) and problem.status > 500:
        _sparse.warning(problem.status, f"{what} ended with {problem.status}: {error}")


def _of_status(error: ClientError, params: Mapping[str, str]) -> ApiError:
    message = _without_address(error)
    match error.status:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _invalid(error, params)
        case grpc.StatusCode.UNAUTHENTICATED:
            return ApiError(401, message, code="invalid_api_key")
        case grpc.StatusCode.PERMISSION_DENIED:
            return ApiError(403, message, code="insufficient_permissions")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _beyond_bound(message, params.get("request"))
    return ApiError(500, message, SERVER)


def _invalid(error: ClientError, params: Mapping[str, str]) -> ApiError:
    """A field that the target has refused, by the caller's name for it."""
    param = param_of(error.field, params)
    problem = str(error).removeprefix(f"{error.field}: ")
    problem = _DOTTED.sub(lambda found: params.get(found[0], found[0]), problem)
    if error.field_reason == TOO_LONG:
        # litellm knows it by how it begins, LangChain by the code in it.
        code = "context_length_exceeded"
        return ApiError(400, f"{problem} ({code})", param=param or None, code=code)
    return bad_request(param or None, problem)


def _beyond_bound(message: str, param: str | None) -> ApiError:
    """More than a target takes in one message."""
    told = _TOO_LARGE.search(message)
    if told is not None:
        return too_large(int(told[1]), int(told[2]), param)
    return ApiError(413, message, param=param, code="request_too_large")


def too_large(size: int, most: int, param: str | None) -> ApiError:
    about = f"the request has {size} bytes for the model's server, which takes {most}"
    message = f"{param}: {about}; make it shorter" if param else about
    return ApiError(413, message, param=param, code="request_too_large")


def param_of(field: str, params: Mapping[str, str]) -> str:
    """The caller's name for a field of the targets' contract: the longest one that is known, and
    what follows it."""
    for theirs in sorted(params, key=len, reverse=True):
        place = field.removeprefix(theirs)
        if not field.startswith(theirs):
            continue
        if theirs.endswith("["):
            return params[theirs]
        if place[:1] in ("", "/", ".", "["):
            return params[theirs] + place
    return field
