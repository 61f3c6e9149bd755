"""The body of a request, within its bounds."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request

from ssd_gateway.http.errors import ApiError

MakeRoom = Callable[[int], Awaitable[None]]


async def read_json(
    request: Request, most: int, seconds: float, large: int, make_room: MakeRoom
) -> bytes:
    """The bytes of a JSON body; raises an ApiError for one that is too long or too slow.
    ``make_room`` waits until so many bytes may come: the length that was told, or, where none was
    and there are more than ``large``, as many as there may be."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported; send plain JSON")
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, most, large, make_room)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the caller has gone") from None


async def _read(request: Request, most: int, large: int, make_room: MakeRoom) -> bytes:
    told = request.headers.get("content-length")
    if told is not None:
        _check(int(told) if told.isdecimal() else most + 1, most)
        await make_room(int(told))
    data, has_room = bytearray(), told is not None
    async for piece in request.stream():
        data += piece
        _check(len(data), most)
        if len(data) > large and not has_room:
            await make_room(most)
            has_room = True
    return bytes(data)


def _check(size: int, most: int) -> None:
    if size > most:
        raise ApiError(
            413,
            f"the body has more than {most} bytes, which is what this gateway (--max-body-mib) and "
            "its largest target take; make it shorter",
            code="request_too_large",
        )
