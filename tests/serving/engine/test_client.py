"""The front's side of an engine: what comes, as it comes, and how it ends."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from ssd_engine.errors import SSDError
from ssd_serving.engine import client
from ssd_serving.engine.client import EngineGone, EngineProcess
from tests.event_loop import on_event_loop
from tests.serving.engine import scripted_engine
from tests.serving.engine.scripted_engine import CLOSED
from tests.waiting import HANG_SECONDS, wait_until_async

BAD = "bad"
LARGE = 3 << 20  # bytes, far beyond what a pipe holds


class Front(EngineProcess):
    """Keeps what the engine says; one word it cannot take."""

    def __init__(self, *script: tuple[str, int]) -> None:
        super().__init__(
            scripted_engine.__name__, list(script), msgspec.msgpack.Decoder(str).decode
        )
        self.words: list[str] = []
        self.ended: list[SSDError] = []

    def dispatch(self, record: str) -> None:
        if record == BAD:
            raise KeyError("a sequence that is not there")
        self.words.append(record)

    def drain(self) -> None: ...

    def forget(self) -> None: ...

    def end_all(self, error: SSDError) -> None:
        self.ended.append(error)

    def kill(self) -> None:
        self._process.kill()


@asynccontextmanager
async def running(*script: tuple[str, int]) -> AsyncIterator[Front]:
    """An event loop that stands still is set free by the death of the engine."""
    front = Front(*script)
    front.start()
    rescue = threading.Timer(HANG_SECONDS, front.kill)
    rescue.start()
    try:
        yield front
    finally:
        rescue.cancel()
        await front.stop()


@pytest.mark.parametrize("missing", [1, 5, 6, 9])  # of the last word, with parts of its header
@on_event_loop
async def test_an_engine_that_stops_inside_a_record_holds_up_nothing(missing: int) -> None:
    """The rest comes only after the event loop has gone on."""
    async with running(("first", 0), ("second", missing), ("third", 0)) as front:
        await wait_until_async(lambda: front.words)
        assert front.words == ["first"]
        front.send("go on")
        await wait_until_async(lambda: len(front.words) == 3 or front.gone.done())
        assert front.words == ["first", "second", "third"]


@on_event_loop
async def test_records_of_any_size_come_whole_and_in_order() -> None:
    words = ["a" * size for size in (0, 1, LARGE, 2, 70_000)]
    async with running(*((word, 0) for word in words)) as front:
        await wait_until_async(lambda: len(front.words) == len(words))
        assert front.words == words


@on_event_loop
async def test_a_record_that_cannot_be_taken_in_ends_all() -> None:
    """Else a stream lacks a token, and ends as if it did not."""
    async with running(("good", 0), (BAD, 0), ("later", 0)) as front:
        await wait_until_async(lambda: front.gone.done() or "later" in front.words)
        assert front.words == ["good"]
        assert [type(error) for error in front.ended] == [EngineGone]
        with pytest.raises(EngineGone, match="a sequence that is not there"):
            front.raise_if_gone()


@on_event_loop
async def test_an_engine_that_takes_its_time_to_end_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "EXIT_SECONDS", HANG_SECONDS)

    async with running((CLOSED, 0)) as front:
        await wait_until_async(lambda: front._exit)
        front.kill()
        await wait_until_async(front.gone.done)
        assert front.gone.result() == "the engine process ended with exit code -9"
