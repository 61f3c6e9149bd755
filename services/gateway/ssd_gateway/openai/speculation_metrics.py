"""What speculation did for an answer, with vLLM's names, and ours beside them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ssd_client.generate.speculation import SpeculationStats, stats_of
from ssd_gateway.openai.choice import Choice


def metrics_of(choices: Sequence[Choice], first_s: float | None, seconds: float) -> dict[str, Any]:
    """``first_s``: from the request to its first token; ``seconds``: to its last."""
    tokens = sum(each.num_tokens for each in choices)
    writing = seconds - (first_s or 0.0)
    return {
        "time_to_first_token_ms": None if first_s is None else 1e3 * first_s,
        "generation_time_ms": 1e3 * writing,
        "tokens_per_second": (tokens - len(choices)) / writing if writing > 0 else None,
        **_speculation(choices),
    }


def _speculation(choices: Sequence[Choice]) -> dict[str, Any]:
    stats = [
        stats_of(each.finish.speculation)
        for each in choices
        if each.finish is not None and each.finish.HasField("speculation")
    ]
    if not stats:
        return {}
    total = stats[0]
    for each in stats[1:]:
        total += each
    return {"speculative_decoding": _by_vllm(total), "ssd": _ours(total, choices)}


def _by_vllm(stats: SpeculationStats) -> dict[str, Any]:
    steps = stats.drafted_per_position[0] if stats.drafted_per_position else 0
    return {
        "mean_acceptance_length": 1 + stats.accepted_tokens / steps if steps else None,
        "draft_acceptance_rate": stats.acceptance,
        "acceptance_histogram": list(stats.accepted_per_position),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "num_draft_tokens": stats.drafted_tokens,
        "num_spec_tokens": len(stats.drafted_per_position),
    }


def _ours(stats: SpeculationStats, choices: Sequence[Choice]) -> dict[str, Any]:
    first = choices[0]
    return {
        **asdict(stats),
        "misses": stats.missed,
        "seed": first.started.seed if first.started else None,
        "target": first.target,
        "sequence": first.started.sequence if first.started else None,
        "moved": sum(each.num_moves for each in choices),
    }
