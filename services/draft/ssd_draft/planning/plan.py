"""Plans how many outcomes of a round to prepare for, from rates measured on each link."""

from dataclasses import dataclass, field
from itertools import product

from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_engine.speculation.fan_out import AcceptanceRate, MissLaw, MissRate, fan_out
from ssd_engine.speculation.frames import Source, Verification
from ssd_engine.speculation.latency_model import StepClock

RANKS = 16  # candidates that are ranked, to learn how fast more of them help; none has more
REJECTED, FULL = MissLaw(0.5, 1.0), MissLaw(0.3, 1.0)  # before anything is measured
# What a tree may fill of the target's forward; the rest is for the way to and fro.
FILL, LEAST_FILL = 0.85, 0.3
# By which it changes when a branch was late, and when it was not: one of seven may be late, as
# messages now and then take their time whatever the tree is like. Late ones in a row count more,
# and so do, once they are many, those in time: what was slow when it began is soon made up for.
LATE, IN_TIME = 0.024, 0.004
MOST_IN_A_ROW = 4
MANY, MOST_AFTER_MANY = 8, 8
# A fan-out is good for an eighth of the rounds that its rates were measured in, and no more than
# this many: they have hardly changed meanwhile.
MOST_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class RoundPlan:
    fan_out: list[int]  # for each number of accepted tokens, how many tokens to prepare for
    depth: int
    patient: bool = False  # there is time for a forward more for each token of the chain

    def width(self, place: int) -> int:
        """About how many outcomes are prepared for at a place of the next speculation."""
        return max(1, self.fan_out[min(place, len(self.fan_out) - 1)])

    @property
    def ranks(self) -> int:
        """How many guesses to rank: one more, since the speculated token is no candidate."""
        return max(max(self.fan_out), RANKS) + 1


@dataclass(slots=True)
class AcceptanceRates:
    """Rates measured on one link, for speculations of one origin that are verified in one way."""

    alpha: AcceptanceRate = field(default_factory=AcceptanceRate)
    rejected: MissRate = field(default_factory=lambda: MissRate(REJECTED, max_fan_out=RANKS))
    full: MissRate = field(default_factory=lambda: MissRate(FULL, max_fan_out=RANKS))
    _fan_outs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _rounds: int = 0
    _good_until: int = 0  # so many rounds: fan-outs are computed anew then

    def observe(self, length: int, accepted: int, rank: int | None, ranked: int) -> None:
        """A round with a speculation of this length has ended."""
        if length:
            self.alpha.observe(accepted, length)
        if ranked:
            (self.full if accepted == length else self.rejected).observe(rank, ranked)
        self._rounds += 1
        if self._rounds > self._good_until:
            self._good_until = self._rounds + min(self._rounds // 8, MOST_ROUNDS - 1)
            self._fan_outs.clear()

    def fan_out(self, length: int, budget: int) -> list[int]:
        case = (length, budget)
        if case not in self._fan_outs:
            rejected, full, alpha = self.rejected.law, self.full.law, self.alpha.value
            self._fan_outs[case] = fan_out(length, alpha, rejected, full, budget, most=RANKS)
        return self._fan_outs[case]


class Planner:
    """Plans the rounds of one link: a target's text and sampling decide its rates."""

    def __init__(
        self,
        depth: int,
        budget: int,
        hit_list: tuple[int, ...] | None = None,
        miss_list: tuple[int, ...] | None = None,
    ) -> None:
        self.depth = depth
        self._budget = budget
        self._lists = {True: hit_list, False: miss_list}
        kinds = product(Verification, (True, False))  # with whether it came from the cache
        self._rates = {kind: AcceptanceRates() for kind in kinds}
        self._fill = dict.fromkeys(Verification, FILL)  # their steps take different times
        self._late_in_a_row = dict.fromkeys(Verification, 0)
        self._in_time_in_a_row = dict.fromkeys(Verification, 0)

    def observe_use(self, sequence: DraftSequence, late: bool) -> None:
        """A branch that was prepared was called for: it was there, or too late."""
        kind = sequence.verification
        num_late = min(self._late_in_a_row[kind] + 1, MOST_IN_A_ROW) if late else 0
        num_in_time = 0 if late else self._in_time_in_a_row[kind] + 1
        self._late_in_a_row[kind], self._in_time_in_a_row[kind] = num_late, num_in_time
        more = IN_TIME * min(max(num_in_time - MANY, 1), MOST_AFTER_MANY)
        fill = self._fill[kind] + (-LATE * num_late if late else more)
        self._fill[kind] = min(max(fill, LEAST_FILL), 1.0)

    def observe(
        self, sequence: DraftSequence, accepted: int, rank: int | None, ranked: int
    ) -> None:
        """A round has ended: so many tokens were right, the next one had this rank."""
        rates = self._rates[sequence.verification, sequence.source is Source.CACHE]
        rates.observe(len(sequence.speculation), accepted, rank, ranked)

    def plan(self, sequence: DraftSequence, clock: StepClock, others: int) -> RoundPlan:
        """``others``: rows that further sequences will put into the same forwards."""
        from_cache = sequence.source is Source.CACHE
        depth = min(self.depth, sequence.depth)
        length = len(sequence.speculation)
        given = self._lists[from_cache]
        patient = self._has_time(sequence, clock, depth, others)
        if given is not None:
            padded = (*given, *(given[-1:] * (length + 1)))
            return RoundPlan(list(padded[: length + 1]), depth, patient)
        budget, depth = self._affordable(sequence, clock, depth, others)
        rates = self._rates[sequence.verification, from_cache]
        return RoundPlan(rates.fan_out(length, budget), depth, patient)

    def _has_time(self, sequence: DraftSequence, clock: StepClock, depth: int, others: int) -> bool:
        """Whether the deepest and widest tree is ready in time, though the chain is read token by
        token before it."""
        if not clock.known or sequence.phase is not DraftRoundPhase.VERIFYING:
            return False
        forwards = depth + len(sequence.speculation) + 1
        available = self._fill[sequence.verification] * sequence.verify_seconds
        return forwards * clock.seconds(others + self._budget) <= available

    def _affordable(
        self, sequence: DraftSequence, clock: StepClock, depth: int, others: int
    ) -> tuple[int, int]:
        """The deepest tree that is ready before the target's forward ends, as wide as that allows.

        A decided path is waited for.
        """
        available = self._fill[sequence.verification] * sequence.verify_seconds
        if not available or not clock.known or sequence.phase is not DraftRoundPhase.VERIFYING:
            return self._budget, depth
        # A forward over the chain comes first, unless the guesses after it are known.
        chain, budget = not sequence.guesses_known, self._budget
        least = min(self._budget, len(sequence.speculation) + 1)
        while depth > 1 and (depth + chain) * clock.seconds(others + least) > available:
            depth -= 1
        while budget > least and (depth + chain) * clock.seconds(others + budget) > available:
            budget -= 1
        return budget, depth
