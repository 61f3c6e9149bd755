"""Who waits in the slow lane is served by what they have had of it, one at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ssd_serving.security.slow_lane import HALF_SECONDS, SlowLane
from tests.waiting import HANG_SECONDS


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


def run(work: Callable[[Served], Coroutine[Any, Any, None]]) -> Served:
    served = Served()

    async def main() -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await work(served)

    asyncio.run(main())
    return served


def test_the_next_is_whoever_has_had_least() -> None:
    async def work(served: Served) -> None:
        hogs = [served.take("hog", 2.0) for _ in range(4)]
        await asyncio.gather(*hogs, served.take("other", 0.5), served.take("other", 0.5))

    assert run(work).names == ["hog", "other", "other", "hog", "hog", "hog"]


def test_what_was_had_long_ago_counts_no_more() -> None:
    async def work(served: Served) -> None:
        await served.take("hog", 8.0)
        await served.take("other", 1.0)
        served.now += 20 * HALF_SECONDS
        await served.take("third", 1.0)
        await asyncio.gather(*(served.take(name, 1.0) for name in ("third", "hog", "other")))

    assert run(work).names[-3:] == ["third", "hog", "other"]


def test_who_leaves_holds_nobody_up() -> None:
    """While waiting, and just when the turn has come."""

    async def work(served: Served) -> None:
        go_on = asyncio.Event()

        async def hold() -> None:
            async with served.lane.turn("first"):
                await go_on.wait()

        holding = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(served.take(name, 1.0)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        go_on.set()
        while not holding.done():
            await asyncio.sleep(0)
        waiting[1].cancel()  # its turn has come, and it has not begun
        await asyncio.gather(*waiting, return_exceptions=True)
        await served.take("d", 1.0)

    assert run(work).names == ["c", "d"]


def test_who_leaves_just_when_it_would_be_its_turn_holds_nobody_up() -> None:
    """In the same turn of the event loop: it does not know yet that it is cancelled."""

    async def work(served: Served) -> None:
        done = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with served.lane.turn("first"):
                await done

        holding = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(served.take("a", 1.0))
        await asyncio.sleep(0)
        done.set_result(None)
        waiting.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        assert holding.exception() is None
        await served.take("b", 1.0)

    assert run(work).names == ["b"]
