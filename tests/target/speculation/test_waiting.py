"""Whether a forward waits for branches, and for how long at most (waiting.py)."""

from typing import Any

import pytest

from ssd_engine.speculation.fan_out import expected_tokens
from ssd_target.speculation.waiting import LONGEST_WAIT, PATIENCE, worthwhile_wait

# A wait pays up to 2.95 tokens × 20 ms − 25 ms = 34 ms.
EVEN = expected_tokens(0.8, 3) * 0.020 - 0.025


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({}, PATIENCE * 0.005),  # a quick draft: a few times its usual delay
        ({"usual_seconds": 0.030}, EVEN),  # until going on would have given as many tokens
        ({"usual_seconds": None}, EVEN),  # unknown: it gets the benefit of the doubt
        ({"usual_seconds": 0.040}, 0.0),  # slower than what waiting is worth
        ({"alpha": 0.0}, 0.0),  # one token either way
        ({"verify_seconds": 0.080}, 0.0),  # a verification costs more than plain steps
        ({"plain_seconds": 0.0}, 0.0),  # nothing measured yet
    ],
)
def test_a_draft_is_waited_for_as_long_as_that_may_pay(
    change: dict[str, Any], seconds: float
) -> None:
    usual = dict(alpha=0.8, depth=3, plain_seconds=0.020, verify_seconds=0.025, usual_seconds=0.005)
    assert worthwhile_wait(**{**usual, **change}) == pytest.approx(seconds)


def test_no_wait_is_longer_than_the_bound_whatever_was_measured() -> None:
    wait = worthwhile_wait(0.9, 7, plain_seconds=60.0, verify_seconds=60.0, usual_seconds=5.0)
    assert wait == LONGEST_WAIT
