"""Beats for streams that the engine has nothing for: signs of its life, never the front's own."""

import asyncio

import pytest

from ssd_serving.engine.records import Beat
from ssd_target.front.backlog import BEAT_SECONDS, Backlog, StreamBeats
from ssd_target.front.service import next_committed
from ssd_target.records.engine_records import Delta

DELTA = Delta(1, [7], None, 0, False)


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
        heard.stream.put_nowait(DELTA)
        assert heard.hears(BEAT_SECONDS) == 0


def test_beats_do_not_gather_before_a_slow_reader(heard: Heard) -> None:
    assert heard.hears(600.0) == 1
    assert heard.stream.size == 0


def test_a_beat_is_a_message_of_its_own_and_never_holds_up_tokens(heard: Heard) -> None:
    heard.stream.put_nowait(Beat())
    assert asyncio.run(next_committed(heard.stream)) == []
    heard.stream.put_nowait(DELTA)
    heard.stream.put_nowait(Beat())
    assert asyncio.run(next_committed(heard.stream)) == [DELTA]
    assert asyncio.run(next_committed(heard.stream)) == []
