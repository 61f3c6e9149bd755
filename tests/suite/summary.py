"""The last lines of a run: what it took, and what was skipped and why."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.suite.tools import PROPERTY

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """Of the machine's clock, and of what all its cores have done."""

    uptime: float
    busy: float  # seconds of all cores

    @classmethod
    def now(cls) -> "Reading":
        uptime, _ = Path("/proc/uptime").read_text().split()
        _, user, nice, system, *_ = Path("/proc/stat").read_text().split("\n")[0].split()
        return cls(float(uptime), sum(map(int, (user, nice, system))) / TICKS)

    @classmethod
    def of_make(cls) -> "Reading | None":
        """When ``make`` began, before it installed anything."""
        read = [float(number) for number in os.environ.get("SSD_MAKE_BEGUN", "").split()]
        return cls(read[0], sum(read[1:]) / TICKS) if len(read) == 4 else None


class Meter:
    """What a run takes, since this was made, and since ``make`` began."""

    def __init__(self) -> None:
        self._begun, self._made = Reading.now(), Reading.of_make()

    def __str__(self) -> str:
        now = Reading.now()
        tests = _took(self._begun, now)
        return f"tests: {tests}" + (f"; in all: {_took(self._made, now)}" if self._made else "")


def _took(begun: Reading, now: Reading) -> str:
    minutes, seconds = divmod(round(now.uptime - begun.uptime), 60)
    return f"{minutes} min {seconds} s, {now.busy - begun.busy:.0f} CPU-seconds of this machine"


def skipped(reports: Iterable[pytest.TestReport]) -> str:
    """One line: how many, by reason."""
    reasons: Counter[str] = Counter()
    for report in reports:
        wanted = [value for key, value in report.user_properties if key == PROPERTY]
        reasons[f"needs {wanted[0]}" if wanted else _reason(report)] += 1
    listed = "; ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
    return f"{reasons.total()} skipped: {listed}" if listed else "none skipped"


def _reason(report: pytest.TestReport) -> str:
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return re.sub(r"^Skipped: ", "", said)


def durations(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Seconds of each test, with its fixtures."""
    times: Counter[str] = Counter()
    for report in reports:
        times[report.nodeid] += report.duration  # type: ignore[assignment]
    return dict(times)
