"""Speculation as the client sees it: the names of its modes, and what its rounds came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from ssd.v1 import target_pb2

MODES = {
    "ssd": target_pb2.SPECULATION_MODE_SSD,
    "sync": target_pb2.SPECULATION_MODE_SYNC,
    "off": target_pb2.SPECULATION_MODE_OFF,
}
VERIFICATIONS = {
    "coupled": target_pb2.VERIFICATION_MODE_COUPLED,
    "rejection": target_pb2.VERIFICATION_MODE_REJECTION,
}
UNKNOWN = "unknown"  # not said, or a newer server's


@dataclass(frozen=True)
class SpeculationStats:
    """The counters of the protobuf message of this name, which explains each of them."""

    mode: str = UNKNOWN
    verification: str = UNKNOWN
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
    cache_tokens: int = 0
    rejected_rounds: int = 0
    full_rounds: int = 0
    wait_micros: int = 0
    rejection_rounds: int = 0
    cache_round_micros: int = 0
    other_round_micros: int = 0
    stale: int = 0
    disconnected: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    synthetic_acceptance: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, later: SpeculationStats) -> SpeculationStats:
        """Both parts of one generation together; mode and verification are the later one's."""
        return SpeculationStats(
            later.mode,
            later.verification,
            fallbacks=dict(Counter(self.fallbacks) + Counter(later.fallbacks)),
            **{name: getattr(self, name) + getattr(later, name) for name in _COUNTERS},
            drafted_per_position=_sums(self.drafted_per_position, later.drafted_per_position),
            accepted_per_position=_sums(self.accepted_per_position, later.accepted_per_position),
            synthetic_acceptance=max(self.synthetic_acceptance, later.synthetic_acceptance),
        )

    @property
    def missed(self) -> int:
        return self.length_misses + self.token_misses

    @property
    def speculated(self) -> bool:
        """Whether speculation was tried, whatever most rounds went by."""
        return self.drafted_tokens > 0 or self.hit_rate is not None

    @property
    def look_ups(self) -> int:
        return self.hits + self.late + self.stale + self.missed

    @property
    def hit_rate(self) -> float | None:
        """The share of look-ups that found their branch in full; None without any."""
        return _share(self.hits, self.look_ups)

    @property
    def acceptance(self) -> float | None:
        """The share of speculated tokens that were right; None where none were speculated."""
        return _share(self.accepted_tokens, self.drafted_tokens)


def served_otherwise(mode: str | None, verification: str | None, stats: SpeculationStats) -> str:
    """What was not served as it was asked for, in words; empty where all was. None: not asked."""
    if not stats.rounds:
        return ""
    found = []
    if mode in MODES and mode != "off" and not _went_by(mode, stats):
        found.append(f"{mode} as {'sync' if mode == 'ssd' and stats.sync_rounds else 'off'}")
    if verification == "rejection" and stats.speculated and not stats.rejection_rounds:
        found.append("rejection as coupled")
    return f"served otherwise than asked: {', '.join(found)}" if found else ""


def _went_by(mode: str, stats: SpeculationStats) -> bool:
    """Whether any round did."""
    if mode == "sync":
        return stats.sync_rounds > 0
    return stats.look_ups + stats.just_in_time_rounds + stats.ngram_rounds > 0


_COUNTERS = [each.name for each in fields(SpeculationStats) if each.type == "int"]


def stats_of(message: target_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        mode_name(message.mode),
        _name(VERIFICATIONS, message.verification),
        fallbacks=dict(message.fallbacks),
        **{name: getattr(message, name) for name in _COUNTERS},
        drafted_per_position=tuple(message.drafted_per_position),
        accepted_per_position=tuple(message.accepted_per_position),
        synthetic_acceptance=message.synthetic_acceptance,
    )


def origin_name(origin: int) -> str:
    """ "cache", "just_in_time", "ngram", "sync", "grammar" or "target"; empty: not known."""
    if not origin or origin not in target_pb2.TokenOrigin.values():
        return ""
    return target_pb2.TokenOrigin.Name(origin).removeprefix("TOKEN_ORIGIN_").lower()


def mode_name(mode: int) -> str:
    return _name(MODES, mode)


def _name(names: Mapping[str, int], value: int) -> str:
    return next((name for name, each in names.items() if each == value), UNKNOWN)


def _sums(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(some, others, fillvalue=0))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
