"""What a sequence has committed goes out before whatever ends its request. Beats are signs of the
engine's life, never the front's own."""

import pytest

from ssd_engine.errors import SSDError
from ssd_serving.engine.client import EngineGone
from ssd_serving.engine.records import Beat
from ssd_serving.rpc.status import HandedOver, RequestFailed
from ssd_target.front.backlog import BEAT_SECONDS, Backlog, StreamBeats
from ssd_target.front.service import MAX_GATHERED, next_committed
from ssd_target.records.engine_records import Delta
from tests.event_loop import on_event_loop

WHY_NOT = "nothing can be drawn"
ENDS = {
    "engine gone": (EngineGone(WHY_NOT), EngineGone),
    "request failed": (Delta(1, [], None, 0, finished=True, error=WHY_NOT), RequestFailed),
    "handed over": (Delta(1, [], None, 0, finished=True, returned=True), HandedOver),
}


def committed(number: int) -> Delta:
    return Delta(1, [number], None, 0, finished=False)


@pytest.mark.parametrize(("end", "error"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("gathered", [0, 1, 2, 200])
@on_event_loop
async def test_an_error_comes_after_all_that_was_committed(
    end: Delta | SSDError, error: type[SSDError], gathered: int
) -> None:
    backlog, tokens = Backlog(), list[int]()
    for delta in [*map(committed, range(gathered)), end, EngineGone("stops")]:
        backlog.put_nowait(delta)
    with pytest.raises(error):
        while True:
            tokens += [token for delta in await next_committed(backlog) for token in delta.tokens]
    assert tokens == [*range(gathered)]


@on_event_loop
async def test_a_message_is_bounded_and_ends_with_the_last_tokens() -> None:
    backlog, sizes = Backlog(), list[int]()
    for number in range(200):
        backlog.put_nowait(committed(number))
    backlog.put_nowait(Delta(1, [], None, 0, finished=True))
    while not backlog.empty():
        sizes.append(len(await next_committed(backlog)))
    assert sum(sizes) == 201
    assert 340 * (sizes[0] - 1) < MAX_GATHERED <= 340 * sizes[0]


# Beats for streams that the engine has nothing for


class Heard:
    """A stream, and an engine that is heard when a test says so."""

    def __init__(self) -> None:
        self.now, self.stream = 0.0, Backlog()
        self._beats = StreamBeats(lambda: self.now)

    def hears(self, seconds: float) -> int:
        """So often it has beaten while the engine was heard twice a second."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self._beats.heard([self.stream])
        return self.drain()

    def drain(self) -> int:
        count = 0
        while not self.stream.empty():
            count += isinstance(self.stream.get_nowait(), Beat)
        return count


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_a_stream_that_waits_is_told_every_two_seconds(heard: Heard) -> None:
    assert sum(heard.hears(BEAT_SECONDS) for _ in range(11)) == 10


def test_a_frozen_engine_has_no_beats_however_long_the_front_lives(heard: Heard) -> None:
    heard.hears(60.0)
    heard.now += 3600.0
    assert heard.drain() == 0


def test_a_stream_that_gets_tokens_needs_no_beats(heard: Heard) -> None:
    for _ in range(20):
        heard.stream.put_nowait(committed(7))
        assert heard.hears(BEAT_SECONDS) == 0


def test_beats_do_not_gather_before_a_slow_reader(heard: Heard) -> None:
    assert heard.hears(600.0) == 1
    assert heard.stream.size == 0


@on_event_loop
async def test_a_beat_is_a_message_of_its_own_and_never_holds_up_tokens(heard: Heard) -> None:
    heard.stream.put_nowait(Beat())
    assert await next_committed(heard.stream) == []
    for each in (committed(7), Beat()):
        heard.stream.put_nowait(each)
    assert await next_committed(heard.stream) == [committed(7)]
    assert await next_committed(heard.stream) == []
