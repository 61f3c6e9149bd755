"""How many outcomes of a round to prepare for: theorem 12, with rates measured on each link."""

from dataclasses import dataclass, field

from ssd_draft.sequence import DraftSequence
from ssd_engine.fan_out import AcceptanceRate, MissExponent, fan_out
from ssd_engine.frames import Source
from ssd_engine.pace import StepClock

RANKS = 16  # candidates that are ranked, to learn how fast more of them help
SPARE = 0.9  # of the target's forward that a tree may fill


@dataclass(frozen=True, slots=True)
class RoundPlan:
    fan_out: list[int]  # for each number of accepted tokens, how many tokens to prepare for
    depth: int

    def width(self, place: int) -> int:
        """Outcomes that are prepared for at a place of the next speculation, about."""
        return max(1, self.fan_out[min(place, len(self.fan_out) - 1)])

    @property
    def ranks(self) -> int:
        """How many guesses to rank: one more, since the speculated token is no candidate."""
        return max(max(self.fan_out), RANKS) + 1


@dataclass(slots=True)
class Rates:
    """Measured on one link, for speculations of one origin."""

    alpha: AcceptanceRate = field(default_factory=AcceptanceRate)
    exponent: MissExponent = field(default_factory=lambda: MissExponent(max_fan_out=RANKS))


class Planner:
    """One for each link: a target's text and sampling decide its rates."""

    def __init__(
        self,
        depth: int,
        budget: int,
        hit_list: tuple[int, ...] | None = None,
        miss_list: tuple[int, ...] | None = None,
    ) -> None:
        self._depth = depth
        self._budget = budget
        self._lists = {True: hit_list, False: miss_list}
        self._rates = {True: Rates(), False: Rates()}

    def observe(
        self, sequence: DraftSequence, accepted: int, rank: int | None, ranked: int
    ) -> None:
        """A round has ended: so many tokens were right, the next one had this rank."""
        rates = self._rates[sequence.source is Source.CACHE]
        if sequence.speculation:
            rates.alpha.observe(accepted, len(sequence.speculation))
        if ranked:
            rates.exponent.observe(rank, ranked)

    def plan(self, sequence: DraftSequence, clock: StepClock, others: int) -> RoundPlan:
        """``others``: rows that further sequences will put into the same forwards."""
        from_cache = sequence.source is Source.CACHE
        depth = min(self._depth, sequence.depth)
        length = len(sequence.speculation)
        chosen = self._lists[from_cache]
        if chosen is not None:
            padded = (*chosen, *(chosen[-1:] * (length + 1)))
            return RoundPlan(list(padded[: length + 1]), depth)
        rates = self._rates[from_cache]
        budget = self._affordable(sequence, clock, depth, others)
        return RoundPlan(fan_out(length, rates.alpha.value, rates.exponent.value, budget), depth)

    def _affordable(
        self, sequence: DraftSequence, clock: StepClock, depth: int, others: int
    ) -> int:
        """The widest tree that is ready, at full depth, before the target's forward ends."""
        least = min(self._budget, len(sequence.speculation) + 1)
        available = SPARE * sequence.verify_seconds
        if not available or not clock.known:
            return self._budget
        budget = self._budget
        while budget > least and (depth + 1) * clock.seconds(others + budget) > available:
            budget -= 1
        return budget
