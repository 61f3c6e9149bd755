"""The last lines of a run: what it took, and what was skipped and why."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.suite.tools import PROPERTY

TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """Time, and what all cores of the machine have done, since it was made."""

    def __init__(self) -> None:
        self._begun, self._busy = time.monotonic(), _busy_seconds()

    def __str__(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._begun), 60)
        busy = _busy_seconds() - self._busy
        return f"{minutes} min {seconds} s; the cores of this machine were busy for {busy:.0f} s"


def _busy_seconds() -> float:
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system) / TICKS


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
