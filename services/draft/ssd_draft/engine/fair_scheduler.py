"""Which links the next forward serves: all get equal shares of the engine, over about a second.

A link that asks for less than its share should hardly notice one that asks for more. So a
forward is shared by the links that were served least of late and by those that were not served much
more. A *greedy* link has had far more than another one that is at work. It joins where that makes
the forward only a little longer, and has short forwards of its own while no other link has work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, inf

from ssd_engine.speculation.latency_model import StepClock

MEMORY_SECONDS = 1.0  # over which links get equal shares
AT_WORK_SECONDS = 0.25  # a link with nothing to do for so long takes no part
GREEDY, SLACK = 1.5, 64  # times, and rows beyond, what the least served link has had
SHORT_STEP, FEW_ROWS = 0.01, 16  # seconds, or rows, of a forward that is a burden to nobody
JOIN = 1.25  # times as long may a forward be with greedy links than without


@dataclass(eq=False)
class LinkAccount:
    """The account of one link."""

    served: float = 0.0  # rows, recent ones counting more
    worked_at: float = -inf  # when it last had something to do


@dataclass(frozen=True)
class Turn:
    """The next forward: who shares it, who may join it, and how many rows it has at most."""

    sharing: list[LinkAccount]
    joining: list[LinkAccount]
    max_rows: int


class FairScheduler:
    def __init__(self, max_rows: int, clock: StepClock) -> None:
        self._max_rows = max_rows
        self._clock = clock
        self._now: float | None = None

    def turn(
        self, accounts: Iterable[LinkAccount], active: Iterable[LinkAccount], now: float
    ) -> Turn:
        """``active`` have something to do now."""
        accounts, active = list(accounts), sorted(active, key=lambda a: a.served)
        self._forget(accounts, now)
        for account in active:
            account.worked_at = now
        at_work = [a for a in accounts if now - a.worked_at <= AT_WORK_SECONDS]
        least = min((a.served for a in at_work), default=0.0)
        sharing = [a for a in active if a.served <= GREEDY * least + SLACK]
        joining = [a for a in active if a.served > GREEDY * least + SLACK]
        if sharing or not joining:
            return Turn(sharing, joining, self._max_rows)
        longest = max(SHORT_STEP, 2 * self._clock.seconds(1))
        few = min(FEW_ROWS, self._max_rows)
        return Turn([], joining, max(few, self._rows_within(longest)))

    def rows_to_join(self, rows: int) -> int:
        """Rows that greedy links may add to a forward of so many."""
        if not rows:
            return self._max_rows
        return max(0, self._rows_within(JOIN * self._clock.seconds(rows)) - rows)

    def _forget(self, accounts: list[LinkAccount], now: float) -> None:
        memory = 1.0 if self._now is None else exp((self._now - now) / MEMORY_SECONDS)
        self._now = now
        for account in accounts:
            account.served *= memory

    def _rows_within(self, seconds: float) -> int:
        rows = self._max_rows
        while rows > 1 and self._clock.seconds(rows) > seconds:
            rows -= max(1, rows // 8)
        return rows
