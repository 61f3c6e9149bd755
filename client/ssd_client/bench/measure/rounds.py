"""Counts the rounds of a trace: how many tokens were right, and after which the cache hit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ssd_client.status.traces import TraceEvent


def count_rounds(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """Rounds by accepted tokens; look-ups by how many tokens were accepted before them."""
    rounds: dict[tuple[str, int], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.kind == "round":
            rounds[event.address, event.sequence].append(event)
    accepted: Counter[str] = Counter()
    look_ups: dict[str, Counter[str]] = defaultdict(Counter)
    for each in rounds.values():
        each.sort(key=lambda event: event.round)
        accepted.update(str(event.accepted) for event in each)
        for before, event in pairwise(each):
            if event.look_up and event.round == before.round + 1:
                look_ups[str(before.accepted)][event.look_up] += 1
    return _ordered(accepted, look_ups)


def add_rounds(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    accepted: Counter[str] = Counter()
    look_ups: dict[str, Counter[str]] = defaultdict(Counter)
    for each in counts:
        accepted.update(each["accepted"])
        for length, results in each["look_ups"].items():
            look_ups[length].update(results)
    return _ordered(accepted, look_ups)


def _ordered(accepted: Counter[str], look_ups: dict[str, Counter[str]]) -> dict[str, Any]:
    return {
        "accepted": {length: accepted[length] for length in sorted(accepted, key=int)},
        "look_ups": {length: dict(look_ups[length]) for length in sorted(look_ups, key=int)},
    }
