"""Why an epoch of a link is over."""

import asyncio
from typing import Any

import grpc


class LinkBroken(Exception):
    """The epoch is over; says why. ``reason`` is one of a few words, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EndpointMisfit(LinkBroken):
    """The two peers do not fit, or the other one misbehaves: trying again soon is of no use."""


def link_broken(error: Exception) -> LinkBroken:
    """What an error says of the epoch that it has ended."""
    match error:
        case LinkBroken():
            return error
        case grpc.aio.AioRpcError():
            return _by_status(error.code(), error.details())
        case asyncio.InvalidStateError():  # while a frame was on its way
            return _by_status(grpc.StatusCode.OK, "")
        case OSError():
            return LinkBroken("credentials", f"{error.filename}: {error.strerror}")
    return LinkBroken("credentials", str(error))


async def raise_status(call: Any) -> None:
    """The stream is over."""
    raise _by_status(await call.code(), await call.details())


def _by_status(code: grpc.StatusCode, details: str) -> LinkBroken:
    if code is grpc.StatusCode.OK:
        return LinkBroken("ended", "the stream ended")
    message = f"{code.name}: {details}"
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return EndpointMisfit("misfit", message)
    return LinkBroken(code.name.lower(), message)
