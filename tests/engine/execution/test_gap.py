"""How long a device idled between two steps, not counting the time in which none was asked for."""

from typing import Any

from ssd_engine.execution.graphs import GraphRunner


class Moment:
    """An event on a device, at so many milliseconds."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def elapsed_time(self, later: "Moment") -> float:
        return later.milliseconds - self.milliseconds


def test_a_gap_is_that_between_steps_that_follow_each_other() -> None:
    runner: Any = object.__new__(GraphRunner)
    runner._last_end, runner._follows_step = None, False

    def ended(begin: float, end: float, follows_step: bool) -> float:
        seconds: float = runner.ended(Moment(begin), Moment(end), follows_step)
        assert seconds == (end - begin) / 1000
        gap: float = runner.gap_seconds
        return gap

    assert ended(10, 14, False) == 0.0
    assert ended(15, 20, True) == 0.001
    assert ended(60_000, 60_004, False) == 0.0  # the prefill of another request was before it
    assert ended(60_006, 60_010, True) == 0.002
    runner._follows_step = True
    runner.interrupted()
    assert not runner._follows_step
