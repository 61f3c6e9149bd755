"""What a sequence has committed and its stream has not taken yet. No gRPC here.

A client that reads slowly lets it grow; the engine never waits. So it is bounded, in bytes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from ssd_engine.errors import SSDError
from ssd_serving.engine.records import Beat
from ssd_target.records.engine_records import Delta

# In memory, about; objects of Python are not small.
DELTA_BYTES = 300
TOKEN_BYTES = 40
LOGPROBS_BYTES = 200
LOGPROB_BYTES = 120
BEAT_SECONDS = 2.0

Item = Delta | SSDError | Beat


class Backlog(asyncio.Queue[Item]):
    """Deltas in order; an error is the last thing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0  # in bytes
        self._had_news = True  # since the last beat was due

    def beat(self) -> None:
        """Put a beat where nothing came since the last one was due, and nothing waits."""
        if not self._had_news and self.empty():
            self.put_nowait(Beat())
        self._had_news = False

    def _put(self, item: Item) -> None:
        super()._put(item)
        self.size += size_of(item)
        self._had_news = not isinstance(item, Beat)

    def _get(self) -> Item:
        item: Item = super()._get()
        self.size -= size_of(item)
        return item

    @property
    def head(self) -> Item:
        """The next one; there must be one."""
        item: Item = self._queue[0]  # type: ignore[attr-defined]
        return item

    def replace(self, error: SSDError) -> None:
        """All is dropped; what is left to say is why."""
        while not self.empty():
            self.get_nowait()
        self.put_nowait(error)


class StreamBeats:
    """Passes the engine's signs of life on, none of its own: a frozen engine has none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = clock()

    def heard(self, streams: Iterable[Backlog]) -> None:
        """The engine gave a sign of life: every BEAT_SECONDS, streams that got nothing learn it."""
        now = self._clock()
        if now - self._last_at < BEAT_SECONDS:
            return
        self._last_at = now
        for stream in streams:
            stream.beat()


def size_of(item: Item) -> int:
    if not isinstance(item, Delta):
        return 0
    logprobs = item.logprobs or ()
    tops = sum(len(each.top) for each in logprobs)
    return (
        DELTA_BYTES
        + TOKEN_BYTES * len(item.tokens)
        + LOGPROBS_BYTES * len(logprobs)
        + LOGPROB_BYTES * tops
        + len(item.prompt_scores)
    )
