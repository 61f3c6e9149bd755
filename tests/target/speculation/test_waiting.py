"""Whether a forward waits for branches, and for how long at most (waiting.py)."""

import pytest

from ssd_engine.speculation.fan_out import expected_tokens
from ssd_target.speculation.waiting import LONGEST_WAIT, PATIENCE, worthwhile_wait

# A wait pays up to 2.95 tokens × 20 ms − 25 ms = 34 ms.
EVEN = expected_tokens(0.8, 3) * 0.020 - 0.025


def wait(
    alpha: float = 0.8,
    plain_seconds: float = 0.020,
    verify_seconds: float = 0.025,
    usual_seconds: float | None = 0.005,
) -> float:
    return worthwhile_wait(alpha, 3, plain_seconds, verify_seconds, usual_seconds)


def test_a_quick_draft_is_waited_for_a_few_times_its_usual_delay() -> None:
    assert wait() == pytest.approx(PATIENCE * 0.005)


def test_waiting_ends_where_going_on_would_have_given_as_many_tokens() -> None:
    assert wait(usual_seconds=0.030) == pytest.approx(EVEN)


def test_a_draft_whose_delay_is_unknown_gets_the_benefit_of_the_doubt() -> None:
    assert wait(usual_seconds=None) == pytest.approx(EVEN)


@pytest.mark.parametrize(
    "change",
    [
        {"usual_seconds": 0.040},  # slower than what waiting is worth
        {"alpha": 0.0},  # one token either way
        {"verify_seconds": 0.080},  # a verification costs more than plain steps
        {"plain_seconds": 0.0},  # nothing measured yet
    ],
)
def test_what_would_not_pay_is_not_waited_for(change: dict[str, float]) -> None:
    assert wait(**change) == 0.0


def test_no_wait_is_longer_than_the_bound_whatever_was_measured() -> None:
    wait = worthwhile_wait(0.9, 7, plain_seconds=60.0, verify_seconds=60.0, usual_seconds=5.0)
    assert wait == LONGEST_WAIT
