"""How often an engine that has ended is started again."""

from ssd_serving.engine.restarts import WINDOW_SECONDS, Restarts


def test_restarts_are_counted_within_ten_minutes() -> None:
    now = 0.0
    restarts = Restarts(2, lambda: now)
    assert [restarts.take() for _ in range(4)] == [1, 2, None, None]
    now += WINDOW_SECONDS
    assert restarts.take() is None
    now += 1
    assert [restarts.take() for _ in range(3)] == [1, 2, None]


def test_none_may_be_allowed() -> None:
    assert Restarts(0).take() is None
