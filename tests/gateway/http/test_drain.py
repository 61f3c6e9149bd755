"""When a drain is over, and what becomes of what still runs."""

from ssd_gateway.http.drain import Drain


def test_a_drain_is_done_when_nothing_runs_or_time_is_over() -> None:
    now, ended = [0.0], []
    drain = Drain(5.0, lambda: now[0])
    with drain.running(lambda: ended.append("one")):
        assert not drain.is_done
        drain.begin()
        now[0] = 4.9
        assert not drain.is_done
        now[0] = 5.0
        assert drain.is_done
        drain.end_all()
        assert ended == ["one"]
        with drain.running(lambda: ended.append("late")):
            assert ended == ["one", "late"]
    drain.begin()
    assert drain.is_done
