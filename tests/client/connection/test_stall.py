"""A stream that stands still, without a network or a clock."""

import asyncio
import contextlib

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.stall import LOOK_SECONDS, StallWatch

STARTED = pb.GenerateResponse(started=pb.GenerateStarted(beat_millis=2000))
OLD_STARTED = pb.GenerateResponse(started=pb.GenerateStarted())
BEAT = pb.GenerateResponse(beat=pb.GenerateBeat())
TOKEN = pb.GenerateResponse(tokens=pb.GenerateTokens(token_ids=[7]))


class Watched:
    """A watch of ten seconds, and the clock of who looks."""

    def __init__(self) -> None:
        self.now, self.elsewhere = 100.0, True
        self.watch = StallWatch(10.0, lambda: self.elsewhere)

    def hear(self, response: pb.GenerateResponse) -> None:
        self.watch.take(response)
        self.watch.wait()

    def looks(self, seconds: float) -> bool:
        """True if one of the looks within so many seconds found it still."""
        found = False
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            found = self.watch.look(self.now) or found
        return found


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize("heard", [[], [STARTED], [STARTED, BEAT], [STARTED, TOKEN]])
def test_silence_after_whatever_came_is_noticed(watched, heard):
    for response in heard:
        assert not watched.looks(9.0)
        watched.hear(response)
    assert not watched.looks(9.9)
    assert watched.looks(0.5)
    assert watched.watch.stalled


@pytest.mark.parametrize("heard", [BEAT, TOKEN, pb.GenerateResponse(prompt=pb.GeneratePrompt())])
def test_whatever_comes_is_a_sign_of_life(watched, heard):
    watched.hear(STARTED)
    for _ in range(60):
        assert not watched.looks(2.0)
        watched.hear(heard)


def test_a_server_without_beats_may_queue_a_stream_for_long(watched):
    for response in (OLD_STARTED, TOKEN):
        watched.hear(response)
        assert not watched.looks(600.0)


def test_time_in_which_we_stood_still_is_not_the_servers(watched):
    watched.hear(STARTED)
    assert not watched.looks(9.9)
    watched.now += 3600.0  # this process was stopped; what came is not read yet
    assert not watched.watch.look(watched.now)
    watched.hear(BEAT)
    assert not watched.looks(9.9)
    watched.hear(BEAT)
    for _ in range(30):  # looks that come late count no more than others
        watched.now += 5.0
        assert not watched.watch.look(watched.now)


def test_a_response_that_is_being_used_is_not_waited_for(watched):
    watched.hear(STARTED)
    watched.watch.take(TOKEN)  # its reader takes its time
    assert not watched.looks(60.0)
    watched.watch.wait()
    assert not watched.looks(9.9)
    assert watched.looks(0.5)


def test_with_nowhere_to_go_it_waits_and_goes_once_it_can(watched):
    watched.hear(STARTED)
    for watched.elsewhere in (False, True):
        assert watched.looks(600.0) == watched.elsewhere


def test_the_cancellation_of_a_task_is_not_taken_for_that_of_its_call(watched):
    async def cancelled() -> tuple[bool, bool]:
        task = asyncio.current_task()
        before = watched.watch.ended()
        task.cancel()
        after = watched.watch.ended()
        task.uncancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return before, after

    assert watched.looks(10.5)
    assert asyncio.run(cancelled()) == (True, False)
