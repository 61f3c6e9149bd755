"""Before and after: what grew, by how much, and whether that is too much."""

import statistics
from dataclasses import dataclass, field

from tools.soak.services import Figures

# Memory moves with what a process has seen; growth is a trend beyond this.
RSS_SHARE, RSS_MIB = 0.05, 24.0
# Threads come and go with what happens at the moment of a look.
SPARE_THREADS = 2
SPARE_DESCRIPTORS = 2

Key = tuple[str, str]  # service and role


@dataclass
class Trend:
    """The memory of a process over time."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def add(self, second: float, mib: float) -> None:
        self.seconds.append(second)
        self.mib.append(mib)

    @property
    def begin(self) -> float:
        return statistics.median(self.mib[: max(1, len(self.mib) // 3)])

    @property
    def end(self) -> float:
        return statistics.median(self.mib[-max(1, len(self.mib) // 3) :])

    @property
    def slope_per_hour(self) -> float:
        if len(self.mib) < 2:
            return 0.0
        return statistics.linear_regression(self.seconds, self.mib).slope * 3600

    @property
    def grew(self) -> bool:
        return self.end - self.begin > max(RSS_MIB, RSS_SHARE * self.begin)


def grown(before: dict[Key, Figures], after: dict[Key, Figures]) -> list[str]:
    """Descriptors and threads beyond those of the warmed-up process."""
    problems = []
    for key, now in after.items():
        then = before[key]
        who = " ".join(key)
        if now.descriptors > then.descriptors + SPARE_DESCRIPTORS:
            counts = f"{now.descriptors} descriptors, {then.descriptors} before"
            problems.append(f"{who}: {counts}: {then.files}, now {now.files}")
        if now.threads > then.threads + SPARE_THREADS:
            problems.append(f"{who}: {now.threads} threads, {then.threads} before")
    return problems


def lines(
    before: dict[Key, Figures], after: dict[Key, Figures], trends: dict[Key, Trend]
) -> list[str]:
    head = (
        f"{'process':<18} {'RSS MiB before':>14} {'after':>8} {'first third':>12} "
        f"{'last third':>11} {'MiB/h':>8} {'files':>9} {'threads':>9}"
    )
    rows = [head]
    for key, now in after.items():
        then, trend = before[key], trends.get(key)
        memory = (
            f"{trend.begin:>12.1f} {trend.end:>11.1f} {trend.slope_per_hour:>+8.0f}"
            if trend is not None and trend.mib
            else f"{'-':>12} {'-':>11} {'-':>8}"
        )
        rows.append(
            f"{' '.join(key):<18} {then.rss_mib:>14.1f} {now.rss_mib:>8.1f} {memory} "
            f"{then.descriptors:>4}→{now.descriptors:<4} {then.threads:>4}→{now.threads:<4}"
        )
    return rows
