"""Both directions of a stream end together, whatever ends them."""

import asyncio

import pytest

from ssd_engine.errors import SSDError
from ssd_serving.rpc.streams import exchange


class Direction:
    """One that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True


async def ends(error: Exception | None = None) -> None:
    await asyncio.sleep(0)
    if error is not None:
        raise error


def test_one_that_ends_ends_the_other() -> None:
    async def check() -> None:
        other = Direction()
        await exchange(asyncio.get_running_loop().create_future(), ends(), other.run())
        assert other.cancelled

    asyncio.run(check())


def test_an_error_of_a_direction_is_raised() -> None:
    async def check() -> None:
        other = Direction()
        with pytest.raises(SSDError, match="broken"):
            await exchange(
                asyncio.get_running_loop().create_future(), other.run(), ends(SSDError("broken"))
            )
        assert other.cancelled

    asyncio.run(check())


def test_a_failure_of_the_stream_ends_both() -> None:
    async def check() -> None:
        directions = Direction(), Direction()
        failure: asyncio.Future[SSDError] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(failure.set_result, SSDError("left"))
        with pytest.raises(SSDError, match="left"):
            await exchange(failure, *(each.run() for each in directions))
        assert all(each.cancelled for each in directions)

    asyncio.run(check())
