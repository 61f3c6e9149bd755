"""What the paper predicts for the three modes at batch 1, from times of each side alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssd_client.bench.measure.draft_alone import DraftTimes
from ssd_client.bench.measure.requests import MeasuredRequest
from ssd_client.status.traces import TraceEvent


@dataclass(frozen=True)
class SpeculationRates:
    """Rates of speculation, measured on other prompts than those that are timed."""

    e_sync: float  # tokens of a round in turns
    p: float  # rounds whose speculation came from the cache
    e_hit: float
    e_miss: float


@dataclass(frozen=True)
class Times:
    """Times of each side, in seconds."""

    plain_round: float  # one token
    verify: float  # a verification, and what lies between two of them
    draft_turn: float  # the draft's turn in mode sync
    draft: DraftTimes


@dataclass(frozen=True)
class Prediction:
    """Tokens per second of each mode, and what they are predicted from."""

    rates: SpeculationRates
    times: Times
    off: float
    sync: float
    ssd: float
    ceiling: float  # the most that ssd can gain over sync: everything hits, and drafting is free

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def predict(rates: SpeculationRates, times: Times) -> Prediction:
    """Theorem 7, and its ceiling."""
    turns = times.draft_turn / times.verify
    sync = rates.e_sync / (times.verify + times.draft_turn)
    return Prediction(
        rates,
        times,
        off=1 / times.plain_round,
        sync=sync,
        ssd=theorem7(rates, times),
        ceiling=(1 + turns) * rates.e_hit / rates.e_sync,
    )


def theorem7(rates: SpeculationRates, times: Times) -> float:
    """Tokens per second: what a round gives, over what it takes."""
    tree, backup = times.draft.tree / times.verify, times.draft.backup / times.verify
    tokens = rates.p * rates.e_hit + (1 - rates.p) * rates.e_miss
    verifications = rates.p * max(1.0, tree) + (1 - rates.p) * (1 + backup)
    return tokens / (times.verify * verifications)


def rates_of(sync: Sequence[MeasuredRequest], ssd: Sequence[MeasuredRequest]) -> SpeculationRates:
    return SpeculationRates(e_sync=_per_round(sync), **_hits(ssd))


def _per_round(done: Sequence[MeasuredRequest]) -> float:
    rounds = sum(each.stats.rounds for each in done)
    return 1 + sum(each.stats.accepted_tokens for each in done) / max(1, rounds)


def _hits(done: Sequence[MeasuredRequest]) -> dict[str, float]:
    stats = [each.stats for each in done]
    rounds, hits = sum(s.rounds for s in stats), sum(s.cache_rounds for s in stats)
    right, cached = sum(s.accepted_tokens for s in stats), sum(s.cache_tokens for s in stats)
    return {
        "p": hits / max(1, rounds),
        "e_hit": 1 + cached / max(1, hits),
        "e_miss": 1 + (right - cached) / max(1, rounds - hits),
    }


def times_of(off: Sequence[TraceEvent], sync: Sequence[TraceEvent], draft: DraftTimes) -> Times:
    """Times from traces of requests in turns: nothing overlaps, so each side was alone."""
    turn = _median(sync, "draft")
    return Times(
        plain_round=_median(off, "round"),
        verify=_median(sync, "round") - turn,
        draft_turn=turn,
        draft=draft,
    )


def _median(events: Sequence[TraceEvent], kind: str) -> float:
    return statistics.median(event.seconds for event in events if event.kind == kind)
