"""Both directions of a stream end together, whatever ends them."""

import asyncio

import pytest

from ssd_engine.errors import SSDError
from ssd_serving.rpc.streams import exchange
from tests.event_loop import on_event_loop


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


@on_event_loop
async def test_one_that_ends_ends_the_other() -> None:
    """Its error is raised."""
    failure: asyncio.Future[SSDError] = asyncio.get_running_loop().create_future()
    quiet, loud = Direction(), Direction()
    await exchange(failure, ends(), quiet.run())
    with pytest.raises(SSDError, match="broken"):
        await exchange(failure, loud.run(), ends(SSDError("broken")))
    assert (quiet.cancelled, loud.cancelled) == (True, True)


@on_event_loop
async def test_a_failure_of_the_stream_ends_both() -> None:
    one, other = Direction(), Direction()
    failure: asyncio.Future[SSDError] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(failure.set_result, SSDError("left"))
    with pytest.raises(SSDError, match="left"):
        await exchange(failure, one.run(), other.run())
    assert (one.cancelled, other.cancelled) == (True, True)
