"""An endpoint that does not pay, as measured, is left and tried again later (payoff.py)."""

import pytest

from ssd_target.speculation.payoff import (
    BETWEEN_PLAIN,
    FIRST_PAUSE,
    FIRST_ROUNDS,
    LONGEST_PAUSE,
    PLAIN_ROUNDS,
    PROBE_ROUNDS,
    Payoff,
    Phase,
)

PLAIN_SECONDS = 0.010


def rounds_of_phases(payoff: Payoff, tokens: int, seconds: float, num_phases: int) -> list[int]:
    """Run rounds that speculate at this rate until so many phases have ended; their lengths."""
    lengths = []
    for _ in range(num_phases):
        phase, rounds = payoff.phase, 0
        while payoff.phase is phase:
            if payoff.speculates:
                payoff.observe(True, tokens, seconds)
            else:
                payoff.observe(False, 1, PLAIN_SECONDS)
            rounds += 1
        lengths.append(rounds)
    return lengths


def test_one_that_pays_is_compared_with_plain_rounds_and_stays_on() -> None:
    payoff = Payoff()
    lengths = rounds_of_phases(payoff, tokens=3, seconds=0.012, num_phases=5)
    assert lengths == [FIRST_ROUNDS, PLAIN_ROUNDS, BETWEEN_PLAIN, PLAIN_ROUNDS, BETWEEN_PLAIN]
    assert payoff.attaches


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(1, 0.011), (1, PLAIN_SECONDS), (3, 0.050)],
    ids=["always wrong", "no gain", "right, but slower than plain rounds"],
)
def test_one_that_does_not_pay_is_left(tokens: int, seconds: float) -> None:
    payoff = Payoff()
    rounds_of_phases(payoff, tokens, seconds, num_phases=2)
    assert payoff.phase is Phase.OFF
    assert not payoff.speculates
    assert not payoff.attaches


def test_one_that_was_left_is_probed_after_pauses_that_double_up_to_a_bound() -> None:
    payoff = Payoff()
    rounds_of_phases(payoff, 1, 0.020, num_phases=2)
    pauses = []
    for _ in range(9):
        pause, probe = rounds_of_phases(payoff, 1, 0.020, num_phases=2)
        pauses.append(pause)
        assert probe == PROBE_ROUNDS
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_one_that_has_become_good_is_taken_back_at_its_next_probe() -> None:
    payoff = Payoff()
    rounds_of_phases(payoff, 1, 0.020, num_phases=2)
    assert payoff.phase is Phase.OFF
    rounds_of_phases(payoff, 4, 0.012, num_phases=2)
    assert payoff.attaches
    assert rounds_of_phases(payoff, 4, 0.012, num_phases=2) == [PLAIN_ROUNDS, BETWEEN_PLAIN]


def test_a_round_of_another_phase_is_no_evidence() -> None:
    payoff = Payoff()
    for _ in range(100):
        payoff.observe(False, 1, PLAIN_SECONDS)
    assert payoff.phase is Phase.ON
    assert payoff.without.rounds == 0


def test_without_auto_off_an_endpoint_is_kept_whatever_it_is_worth() -> None:
    payoff = Payoff(enabled=False)
    for _ in range(1000):
        payoff.observe(True, 1, 1.0)
    assert payoff.speculates
