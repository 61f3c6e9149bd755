"""What speculation did, for one request or for all. Plain counters."""

from enum import Enum
from itertools import accumulate, zip_longest

import msgspec

from ssd_engine.speculation.frames import Source
from ssd_engine.tracing.histogram import count_seconds, new_counts
from ssd_target.records.speculation_options import Mode


class LookUp(Enum):
    """What a look-up of an outcome among the branches found."""

    HIT = "hit"  # its branch in full
    LATE = "late"  # the beginning of it, or nothing at all had come in this round
    MISS_LENGTH = "miss_length"  # no branch after so many tokens
    MISS_TOKEN = "miss_token"  # none that begins with this token
    STALE = "stale"  # nothing, and what was pushed meanwhile is of a round or epoch that is over
    DISCONNECTED = "disconnected"  # nobody could look: the sequence's link is down


# Why rounds go without the speculation that was asked for. Of these the first leave no link.
DOWN = ("disconnected", "stalled", "leaving")
FALLBACKS = (
    *DOWN,
    "lost",
    "busy",
    "refused",
    "does not pay",
    "no room",
    "set aside",
    "no distributions",
    "coupled: the endpoint is not trusted",
)


class SpeculationStats(msgspec.Struct, array_like=True):
    rounds: int = 0
    hits: int = 0
    late: int = 0
    length_misses: int = 0
    token_misses: int = 0
    cache_rounds: int = 0
    just_in_time_rounds: int = 0
    ngram_rounds: int = 0
    sync_rounds: int = 0
    grammar_rounds: int = 0
    plain_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_tokens: int = 0  # accepted ones that came from the cache
    rejected_rounds: int = 0
    full_rounds: int = 0
    wait_micros: int = 0
    rejection_rounds: int = 0
    cache_round_micros: int = 0
    other_round_micros: int = 0
    stale: int = 0
    disconnected: int = 0
    # Rounds by how many tokens they speculated, and by how many of these were right.
    drafted_lengths: list[int] = []
    accepted_lengths: list[int] = []
    # Rounds that waited, by how long: a count for each of histogram.EDGES, and one beyond.
    waits: list[int] = []
    mode_rounds: list[int] = []  # rounds by the mode that they went by, at the mode's number
    fallbacks: dict[str, int] = {}

    def looked_up(self, result: LookUp) -> None:
        name = LOOK_UPS[result]
        setattr(self, name, getattr(self, name) + 1)

    def fell_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def waited(self, seconds: float) -> None:
        """The forward of a round that is over had been held back for so long."""
        self.wait_micros += int(seconds * 1e6)
        self.waits = self.waits or new_counts()
        count_seconds(self.waits, seconds)

    def ended(
        self, mode: Mode, source: Source, drafted: int, accepted: int, seconds: float
    ) -> None:
        """A round is over; it has taken so long."""
        name = _ROUNDS[source]
        setattr(self, name, getattr(self, name) + 1)
        _count(self.mode_rounds, mode)
        self.rounds += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        _count(self.drafted_lengths, drafted)
        _count(self.accepted_lengths, accepted)
        if source is Source.CACHE:
            self.cache_tokens += accepted
            self.cache_round_micros += int(seconds * 1e6)
        else:
            self.other_round_micros += int(seconds * 1e6)
        if drafted:
            self.full_rounds += accepted == drafted
            self.rejected_rounds += accepted < drafted

    def rounds_in(self, mode: Mode) -> int:
        return self.mode_rounds[mode] if mode < len(self.mode_rounds) else 0

    @property
    def usual_mode(self) -> Mode:
        """The mode that most rounds went by."""
        return max((Mode.OFF, Mode.SYNC, Mode.SSD), key=self.rounds_in)

    def add(self, other: "SpeculationStats") -> None:
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LISTS:
            sums = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [mine + theirs for mine, theirs in sums])
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count


def _count(lengths: list[int], length: int) -> None:
    if length >= len(lengths):
        lengths += [0] * (length + 1 - len(lengths))
    lengths[length] += 1


def per_position(lengths: list[int]) -> list[int]:
    """How many of the rounds reach a first, second, … token."""
    return list(accumulate(reversed(lengths[1:])))[::-1]


_LISTS = ("drafted_lengths", "accepted_lengths", "waits", "mode_rounds")
_COUNTERS = tuple(
    name for name in SpeculationStats.__struct_fields__ if name not in (*_LISTS, "fallbacks")
)
LOOK_UPS = {
    LookUp.HIT: "hits",
    LookUp.LATE: "late",
    LookUp.MISS_LENGTH: "length_misses",
    LookUp.MISS_TOKEN: "token_misses",
    LookUp.STALE: "stale",
    LookUp.DISCONNECTED: "disconnected",
}
_ROUNDS = {
    Source.NONE: "plain_rounds",
    Source.CACHE: "cache_rounds",
    Source.JUST_IN_TIME: "just_in_time_rounds",
    Source.NGRAM: "ngram_rounds",
    Source.SYNC: "sync_rounds",
    Source.GRAMMAR: "grammar_rounds",
}
