"""A start says what it is at: a bar in a terminal, a line now and then elsewhere."""

import io
import logging

import pytest

from ssd_engine.process import progress
from ssd_engine.process.log import JsonLines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("ssd_engine.process.progress.time.monotonic", lambda: now[0])
    return now


def run(clock: list[float], seconds: float, count: int = 10, **options: bool) -> None:
    for _ in progress.tracked("loading weights", range(count), count, "layers", **options):
        clock[0] += seconds


def test_what_takes_long_says_so_now_and_then(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(clock, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 2 of 10 layers",
        "loading weights: 7 of 10 layers",
    ]


def test_what_is_over_soon_says_nothing(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(clock, 0.1)
    run(clock, 9.0, quiet=True)  # another rank
    assert not caplog.records


def shown(
    formatter: logging.Formatter, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What a terminal is told, bar by bar, where lines of the log have this format."""
    handler, terminal = logging.StreamHandler(io.StringIO()), Terminal()
    handler.setFormatter(formatter)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr("sys.stderr", terminal)
    run(clock, 1.0, count=4)
    return terminal.getvalue().split("\r")


def test_in_a_terminal_there_is_a_bar_that_goes_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But lines of JSON stay lines."""
    caplog.set_level(logging.INFO)
    frames = shown(logging.Formatter(), clock, monkeypatch)
    assert frames[3] == f"loading weights {'█' * 12}{'░' * 12} 2 of 4 layers\033[K"
    assert frames[-1] == "\033[K"
    assert "█" not in "".join(shown(JsonLines("x", None), clock, monkeypatch))
