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


def test_in_a_terminal_there_is_a_bar_that_goes_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger(), "handlers", [plain_handler(logging.Formatter())])
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run(clock, 1.0, count=4)
    frames = terminal.getvalue().split("\r")
    assert frames[3] == f"loading weights {'█' * 12}{'░' * 12} 2 of 4 layers\033[K"
    assert frames[-1] == "\033[K"


def test_lines_of_json_stay_lines(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger(), "handlers", [plain_handler(JsonLines("x", None))])
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    run(clock, 1.0)
    assert "█" not in terminal.getvalue()


def plain_handler(formatter: logging.Formatter) -> logging.Handler:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatter)
    return handler


def test_nothing_is_swallowed_on_the_way(clock: list[float]) -> None:
    assert list(progress.tracked("x", "abc", 3, "letters")) == ["a", "b", "c"]
