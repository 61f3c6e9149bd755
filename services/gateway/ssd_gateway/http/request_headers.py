"""Headers of a request that go on to targets, as far as they are what they should be, and the id
of the request."""

import re
from secrets import token_hex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

# https://www.w3.org/TR/trace-context: versions to come may have more behind the flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
_VERSION, _LENGTH = "00-", 55  # of the version that there is
MAX_TRACEPARENT = 256
MAX_REQUEST_ID = 256


def is_printable(text: str) -> bool:
    """Whether gRPC can carry it."""
    return text.isascii() and text.isprintable()


def traceparent_of(request: Request) -> str | None:
    """The trace that the caller has begun; one that is not valid is ignored, as W3C has it."""
    told = request.headers.get("traceparent", "")
    if len(told) > MAX_TRACEPARENT or _TRACEPARENT.fullmatch(told) is None:
        return None
    return None if told.startswith(_VERSION) and len(told) != _LENGTH else told


def request_id_of(request: Request, named: str | None = None) -> str:
    """The caller's own, ``named`` in the body or in a header, else a new one. Logs of all services
    have it."""
    state = request.state
    told = named or getattr(state, "request_id", None) or request.headers.get("x-request-id", "")
    state.request_id = valid_request_id(told)
    return str(state.request_id)


def valid_request_id(told: str) -> str:
    """The id that was told, if it is one, else a new one."""
    return told[:MAX_REQUEST_ID] if told and is_printable(told) else token_hex(8)


def with_request_id(request: Request, answer: Any) -> Any:
    """The answer with the request's id, unless it has that by itself."""
    if isinstance(answer, Response):
        answer.headers.setdefault("x-request-id", request_id_of(request))
    return answer
