"""Who waits in the slow lane is served by what they have had of it, one at a time."""

import asyncio

import pytest

from ssd_serving.security.slow_lane import HALF_SECONDS, SlowLane
from tests.event_loop import on_event_loop


class Served:
    """What has its turn, in order, each for as many seconds as it says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lane = SlowLane(lambda: self.now)
        self.names: list[str] = []

    async def take(self, name: str, seconds: float) -> None:
        async with self.lane.turn(name):
            self.names.append(name)
            await asyncio.sleep(0)
            self.now += seconds


@on_event_loop
async def test_the_next_is_whoever_has_had_least() -> None:
    served = Served()
    hogs = [served.take("hog", 2.0) for _ in range(4)]
    await asyncio.gather(*hogs, served.take("other", 0.5), served.take("other", 0.5))
    assert served.names == ["hog", "other", "other", "hog", "hog", "hog"]


@on_event_loop
async def test_what_was_had_long_ago_counts_no_more() -> None:
    served = Served()
    await served.take("hog", 8.0)
    await served.take("other", 1.0)
    served.now += 20 * HALF_SECONDS
    await served.take("third", 1.0)
    await asyncio.gather(*(served.take(name, 1.0) for name in ("third", "hog", "other")))
    assert served.names[-3:] == ["third", "hog", "other"]


@pytest.mark.parametrize(
    ("leaves", "names"), [("waits", "bcd"), ("begins", "cd"), ("would begin", "bcd")]
)
@on_event_loop
async def test_who_leaves_holds_nobody_up(leaves: str, names: str) -> None:
    """While waiting, when the turn has come and nothing has begun, or in the same turn of the
    event loop, not knowing yet of the cancellation."""
    served, go_on = Served(), asyncio.Event()

    async def hold() -> None:
        async with served.lane.turn("first"):
            await go_on.wait()

    holding = asyncio.ensure_future(hold())
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(served.take(name, 1.0)) for name in "abc"]
    await asyncio.sleep(0)
    if leaves != "would begin":
        waiting[0].cancel()
    go_on.set()
    if leaves == "begins":
        while not holding.done():
            await asyncio.sleep(0)
        waiting[1].cancel()
    waiting[0].cancel()
    await asyncio.gather(holding, *waiting, return_exceptions=True)
    assert holding.exception() is None
    await served.take("d", 1.0)
    assert "".join(served.names) == names
