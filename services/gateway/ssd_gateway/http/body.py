"""The body of a request, within its bounds."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from ssd_gateway.http.errors import ApiError


async def read_json(request: Request, most: int, seconds: float) -> bytes:
    """The bytes of a JSON body; raises an ApiError for one that is too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported; send plain JSON")
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, most)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the caller has gone") from None


async def _read(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "0")
    data = bytearray()
    if told.isdecimal() and int(told) <= most:
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise ApiError(
        413, f"the body has more than {most} bytes (--max-body-mib)", code="request_too_large"
    )
