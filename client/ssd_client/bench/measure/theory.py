"""What the paper predicts for the three modes at batch 1, from times of each side alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_client.bench.measure.draft_alone import DraftTimes
from ssd_client.bench.measure.requests import MeasuredRequest, total_stats
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


def predict(rates: SpeculationRates, times: Times) -> Prediction:
    """Theorem 7, and its ceiling."""
    turns = times.draft_turn / times.verify
    parts = (times.verify, times.draft.tree / times.verify, times.draft.backup / times.verify)
    return Prediction(
        rates,
        times,
        off=1 / times.plain_round,
        sync=rates.e_sync / (times.verify + times.draft_turn),
        ssd=theorem7(rates.p, rates.e_hit, rates.e_miss, *parts),
        ceiling=(1 + turns) * rates.e_hit / rates.e_sync,
    )


def theorem7(p: float, e_hit: float, e_miss: float, t_v: float, t_p: float, t_b: float) -> float:
    """Tokens per second at hit rate p with e_hit or e_miss tokens per round.

    t_v: seconds of one verification; t_p, the tree, and t_b, the backup, in units of t_v.
    """
    tokens = p * e_hit + (1 - p) * e_miss
    return tokens / (t_v * (p * max(1.0, t_p) + (1 - p) * (1 + t_b)))


def rates_of(sync: Sequence[MeasuredRequest], ssd: Sequence[MeasuredRequest]) -> SpeculationRates:
    turns, found = total_stats(sync), total_stats(ssd)
    others = found.rounds - found.cache_rounds
    return SpeculationRates(
        e_sync=1 + turns.accepted_tokens / max(1, turns.rounds),
        p=found.cache_rounds / max(1, found.rounds),
        e_hit=1 + found.cache_tokens / max(1, found.cache_rounds),
        e_miss=1 + (found.accepted_tokens - found.cache_tokens) / max(1, others),
    )


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
