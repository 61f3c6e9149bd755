"""Which of the target's hidden states are watched: what somebody reads, and seldom changed.

A device captures its steps anew for each change that adds boundaries, graph by graph while it
serves: whatever endpoints ask for, that begins once in ``WATCH_SECONDS``.
"""

import logging
import math
from collections.abc import Iterable

from ssd_engine.speculation.features import MAX_BOUNDARIES
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint

log = logging.getLogger(__name__)

MOST_BOUNDARIES = 2 * MAX_BOUNDARIES  # that are watched at a time
WATCH_SECONDS = 60.0  # after which others may be


class WatchedBoundaries:
    def __init__(self, inside: tuple[int, ...] = ()) -> None:
        """``inside``: what a head inside the target reads."""
        self.inside = inside
        self.now: tuple[int, ...] = ()
        # The last ones with those of endpoints, for which steps are captured, or will be soon.
        self._captured: tuple[int, ...] = ()
        self._captured_at = -math.inf
        self._without_memory: set[tuple[int, ...]] = set()
        self._given_up: set[tuple[int, int | None]] = set()  # links and epochs
        self._left_out: set[tuple[int, int | None]] = set()  # likewise, for want of places

    def wanted(self, endpoints: Iterable[DraftEndpoint], now: float) -> tuple[int, ...]:
        """The boundaries that somebody reads; those that are watched until others may be."""
        asked = self._asked(endpoints, now)
        wanted = self._with(asked, now) if asked else self._with_none()
        return self.now if wanted in self._without_memory else wanted

    def _with_none(self) -> tuple[int, ...]:
        """To leave boundaries out costs nothing, unless steps are to go on telling others."""
        return self.now if self.inside and set(self.inside) <= set(self.now) else self.inside

    def _with(self, asked: set[int], now: float) -> tuple[int, ...]:
        for known in (self.now, self._captured):  # steps that tell these are captured
            if asked <= set(known):
                return known
        if now < self._captured_at + WATCH_SECONDS:
            return self.now
        return tuple(sorted(asked))

    def _asked(self, endpoints: Iterable[DraftEndpoint], now: float) -> set[int]:
        """Those of as many readers as there is room for; empty without any. Endpoints that only
        requests have named come last."""
        asked: set[int] = set()
        for each in sorted(endpoints, key=lambda endpoint: endpoint.named):
            read = each.boundaries(now)
            if not read or (each.link, each.epoch) in self._given_up:
                continue
            more = {*asked, *self.inside, *read}
            if len(more) <= MOST_BOUNDARIES:
                asked = more
            else:
                self._leave_out(each)
        return asked

    def _leave_out(self, endpoint: DraftEndpoint) -> None:
        visit = (endpoint.link, endpoint.epoch)
        if visit not in self._left_out:
            self._left_out = {other for other in self._left_out if other[0] != endpoint.link}
            self._left_out.add(visit)
            log.warning(
                "link %d is not told the hidden states that its head reads: at most %d boundaries "
                "are watched for all heads together; link fewer kinds of heads",
                endpoint.link,
                MOST_BOUNDARIES,
            )

    def watch(self, boundaries: tuple[int, ...], now: float) -> None:
        """Forwards tell these from now on."""
        self.now = boundaries
        self.prepare(boundaries, now)

    def prepare(self, boundaries: tuple[int, ...], now: float) -> None:
        """Steps are captured for these, from now on if they were not before."""
        if boundaries not in ((), self.inside, self._captured):
            self._captured, self._captured_at = boundaries, now

    def give_up(
        self, boundaries: tuple[int, ...], endpoints: Iterable[DraftEndpoint], now: float
    ) -> None:
        """The device has no memory to tell these: not tried again while the links are up that ask
        for more than is watched."""
        self._captured, self._captured_at = (), now
        if boundaries == self.inside:
            self._without_memory.add(boundaries)
        for each in endpoints:
            if not set(each.boundaries(now)) <= set(self.now):
                self._given_up = {other for other in self._given_up if other[0] != each.link}
                self._given_up.add((each.link, each.epoch))
