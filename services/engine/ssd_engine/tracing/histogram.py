"""Histograms of durations, as an engine keeps them. Plain integers, no I/O."""

from bisect import bisect_left
from itertools import accumulate

# Upper ends, in seconds; what is longer than the last has a count of its own.
EDGES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


def new_counts() -> list[int]:
    return [0] * (len(EDGES) + 1)


def count_seconds(counts: list[int], seconds: float) -> None:
    counts[bisect_left(EDGES, seconds)] += 1


def cumulative(counts: list[int], at_once: int = 0) -> list[tuple[str, float]]:
    """Counts as Prometheus wants them: how many took no longer than each edge. ``at_once``
    took no time at all, and were not counted one by one; with them comes an edge of their own."""
    sums = list(accumulate(counts or new_counts(), initial=at_once))
    edges = ("0.0", *map(str, EDGES), "+Inf")
    return [(edge, float(total)) for edge, total in zip(edges, sums, strict=True)]
