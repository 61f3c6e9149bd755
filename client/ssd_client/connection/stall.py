"""Notices a stream that stands still: something should have come of it, and nothing did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ssd.v1 import target_pb2
from ssd_client.errors import EndpointStalledError

LOOK_SECONDS = 0.25  # between two looks


class StallWatch:
    """Counts for how long a stream could have been read, and nothing was there.

    Time comes in as a number, at looks that are about LOOK_SECONDS apart. One that comes late
    counts no more than others, and ends nothing: who looks stood still then, and what came
    meanwhile is still to be read. A server that sends no beats may be silent for as long as it
    likes once it has begun. Before that it may still be reading the request: one that is known to
    answer others is not left.
    """

    def __init__(
        self,
        timeout_s: float,
        may_leave: Callable[[], bool],
        answers: Callable[[], bool] = lambda: False,
    ) -> None:
        """`may_leave`: whether there is another place to go to; `answers`: whether the server is
        known to answer."""
        self._timeout_s, self._may_leave, self._answers = timeout_s, may_leave, answers
        self._begun = False
        self._beats = True  # as far as it is known
        self._waits = True
        self._looked_at: float | None = None
        self._quiet_s = 0.0
        self.stalled = False  # for good

    def take(self, response: target_pb2.GenerateResponse) -> None:
        """A response has come, and the next one is not waited for yet."""
        self._waits = False
        if response.WhichOneof("event") == "started":
            self._begun = True
            self._beats = response.started.beat_millis > 0

    def wait(self) -> None:
        """The next response is waited for from now on."""
        self._waits, self._quiet_s, self._looked_at = True, 0.0, None

    def look(self, now: float) -> bool:
        """True if the stream stands still and its request should go on elsewhere."""
        before, self._looked_at = self._looked_at, now
        if not self._waits or not self._beats or before is None:
            return False
        passed = now - before
        self._quiet_s += min(passed, LOOK_SECONDS)
        late = passed > 2 * LOOK_SECONDS
        if self._quiet_s < self._timeout_s or late or (not self._begun and self._answers()):
            return False
        self.stalled = self._may_leave()
        return self.stalled

    def ended(self) -> bool:
        """True if a cancellation that the current task sees is that of the call, by this watch: the
        task itself goes on."""
        task = asyncio.current_task()
        return self.stalled and task is not None and not task.cancelling()

    def failure(self, address: str) -> EndpointStalledError:
        return EndpointStalledError(address, f"nothing came for {self._timeout_s:g} s")


class StallLooker:
    """Looks at all streams of one event loop: one timer, however many they are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watched: dict[StallWatch, Callable[[], object]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, watch: StallWatch, leave: Callable[[], object]) -> Iterator[None]:
        """`leave` is called when the stream stands still."""
        self._watched[watch] = leave
        if self._timer is None:
            self._set_timer()
        try:
            yield
        finally:
            del self._watched[watch]

    def look(self) -> None:
        now = self._clock()
        for watch, leave in list(self._watched.items()):
            if not watch.stalled and watch.look(now):
                leave()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.look()
        if self._watched:
            self._set_timer()
