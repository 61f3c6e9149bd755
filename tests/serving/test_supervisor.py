"""Tasks that last as long as their service are not lost to an error."""

import asyncio
import logging

import pytest

from ssd_serving.supervisor import PAUSES, STEADY_SECONDS, Supervisor
from tests.event_loop import on_event_loop
from tests.waiting import wait_until_async

ENOUGH = 10  # failures, after which the pause grows no more


class World:
    """Where time goes on by pauses, and by what a task takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.failed: list[str] = []
        self.supervisor = Supervisor(self.failed.append, lambda: self.now, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def run(self, seconds_until_failure: list[float]) -> None:
        """A task that fails so often, and then returns."""
        left = list(seconds_until_failure)

        async def work() -> None:
            if left:
                self.now += left.pop(0)
                raise KeyError("nobody foresaw it")

        async def wait() -> None:
            await self.supervisor.start("link", work, "to 10.0.0.1:7420")

        asyncio.run(wait())


def test_it_is_begun_again_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.run([0.0, 0.0])
    assert world.failed == ["link", "link"]
    lines = [(each.levelno, each.getMessage()) for each in caplog.records]
    begun = "task link to 10.0.0.1:7420 failed; it begins again in"
    assert lines == [(logging.ERROR, f"{begun} 0.5 s"), (logging.ERROR, f"{begun} 1 s")]
    assert all(each.exc_info for each in caplog.records)


def test_the_pause_grows_to_a_bound_and_begins_anew_after_a_steady_run() -> None:
    world = World()
    world.run([0.0] * ENOUGH + [STEADY_SECONDS, 0.0])
    first, longest = PAUSES
    assert world.pauses[:3] == [first, 2 * first, 4 * first]
    assert world.pauses[ENOUGH - 1] == longest
    assert world.pauses[ENOUGH:] == [first, 2 * first]


@pytest.mark.parametrize("when", ["it runs", "it pauses"])
@on_event_loop
async def test_it_ends_when_it_is_cancelled(when: str) -> None:
    async def work() -> None:
        if when == "it pauses":
            raise KeyError
        await asyncio.Event().wait()

    async def wait(seconds: float) -> None:
        await asyncio.Event().wait()

    failed: list[str] = []
    task = Supervisor(failed.append, sleep=wait).start("link", work)
    await wait_until_async(lambda: failed or when == "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
