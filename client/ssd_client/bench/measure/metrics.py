"""The metrics of a run: the keys of `vllm bench serve`, and our own about speculation."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_client.bench.measure.requests import MeasuredRequest, total_stats
from ssd_client.generate.speculation import SpeculationStats

Metrics = dict[str, float | int | list[float] | None]
FEW = 6  # values, of which a bootstrap says no more than their range
_DRAWS = 2000  # draws of the bootstrap


@dataclass(frozen=True)
class Interval:
    median: float
    low: float
    high: float


def metrics_of(done: Sequence[MeasuredRequest], seconds: float, devices: int | None) -> Metrics:
    """The metrics of one run that took `seconds` on `devices`; None: their number is not known."""
    good = [each for each in done if each.error is None]
    tokens_in = sum(each.prompt_tokens for each in good)
    tokens_out = sum(each.num_tokens for each in good)
    stats = total_stats(good)
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(done) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
        **_latencies("ttft", [each.ttft_s for each in good]),
        **_latencies("tpot", [each.tpot_s for each in good]),
        **_latencies("itl", [itl for each in good for itl in each.itls_s]),
        **_latencies("e2el", [each.e2el_s for each in good]),
        **_acceptance(stats),
        **_rounds(stats, tokens_out - len(good)),
        "decode_tokens_per_s": _decode_rate(good),
        "tokens_per_s_per_device": None if devices is None else tokens_out / seconds / devices,
    }


def _latencies(name: str, values: Sequence[float | None]) -> Metrics:
    ms = sorted(1e3 * value for value in values if value is not None)
    if not ms:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
        f"p99_{name}_ms": percentile(ms, 99),
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolates between the two values on either side."""
    at = (len(ordered) - 1) * percent / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _acceptance(stats: SpeculationStats) -> Metrics:
    """Acceptance as vLLM counts it: a draft is a round that speculated."""
    drafts = stats.rounds - stats.plain_rounds
    if not drafts:
        return {}
    positions = stats.accepted_per_position
    return {
        "spec_decode_acceptance_rate": 100 * (stats.acceptance or 0.0),
        "spec_decode_acceptance_length": 1 + stats.accepted_tokens / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": stats.drafted_tokens,
        "spec_decode_accepted_tokens": stats.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [right / drafts for right in positions],
    }


def _rounds(stats: SpeculationStats, tokens: int) -> Metrics:
    if not stats.rounds:
        return {}
    missing = stats.rounds - stats.cache_rounds
    right = stats.accepted_tokens - stats.cache_tokens
    return {
        "rounds": stats.rounds,
        "tokens_per_round": tokens / stats.rounds,
        "hit_rate": stats.hit_rate,
        "hits": stats.hits,
        "cache_rounds": stats.cache_rounds,
        "cache_tokens": stats.cache_tokens,
        "late_rounds": stats.late,
        "missed_rounds": stats.missed,
        "rejected_rounds": stats.rejected_rounds,
        "full_rounds": stats.full_rounds,
        "tokens_per_round_hit": _per(stats.cache_tokens + stats.cache_rounds, stats.cache_rounds),
        "tokens_per_round_miss": _per(
            right + missing, missing if stats.hit_rate is not None else 0
        ),
        "wait_per_round_ms": stats.wait_micros / 1e3 / stats.rounds,
    }


def _per(sum_: float, count: int) -> float | None:
    return sum_ / count if count else None


def _decode_rate(done: Sequence[MeasuredRequest]) -> float | None:
    """Tokens a second of a request after its first token, in the mean over requests."""
    rates = [1 / each.tpot_s for each in done if each.tpot_s]
    return statistics.fmean(rates) if rates else None


def interval(values: Sequence[float]) -> Interval:
    """The median, and a bootstrap's 95 % interval of it; of few values their range."""
    if len(values) < FEW:
        return Interval(statistics.median(values), min(values), max(values))
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(_DRAWS))
    median = statistics.median(values)
    return Interval(median, drawn[int(0.025 * _DRAWS)], drawn[int(0.975 * _DRAWS)])
