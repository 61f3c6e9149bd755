"""What the rounds of a trace come to: how much was right, and where the cache hit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ssd_client.traces import TraceEvent


class RoundCounts:
    """Grows with every run of a mode."""

    def __init__(self) -> None:
        self._accepted: Counter[int] = Counter()
        self._looked_up: dict[int, Counter[str]] = defaultdict(Counter)

    def add(self, events: Iterable[TraceEvent]) -> None:
        rounds: dict[tuple[str, int], list[TraceEvent]] = defaultdict(list)
        for event in events:
            if event.kind == "round":
                rounds[event.address, event.sequence].append(event)
        for each in rounds.values():
            self._add_sequence(sorted(each, key=lambda event: event.round))

    def _add_sequence(self, rounds: Sequence[TraceEvent]) -> None:
        self._accepted.update(event.accepted for event in rounds)
        for before, event in pairwise(rounds):
            if event.look_up and event.round == before.round + 1:
                self._looked_up[before.accepted][event.look_up] += 1

    def as_json(self) -> dict[str, Any]:
        """Rounds by accepted tokens; look-ups by how many tokens were accepted before them."""
        return {
            "accepted": {str(length): self._accepted[length] for length in sorted(self._accepted)},
            "look_ups": {
                str(length): dict(self._looked_up[length]) for length in sorted(self._looked_up)
            },
        }
