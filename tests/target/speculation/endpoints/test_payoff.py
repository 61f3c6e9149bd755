"""An endpoint that does not pay, as measured, is left and tried again later (payoff.py)."""

import statistics
from random import Random

import pytest

from ssd_target.speculation.endpoints.payoff import (
    BETWEEN_PLAIN,
    FIRST_PAUSE,
    FIRST_ROUNDS,
    LONGEST_PAUSE,
    PLAIN_ROUNDS,
    PROBE_ROUNDS,
    STEADY_STEPS,
    Payoff,
    Rate,
    TrialPhase,
)
from tests.suite.scale import share

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
    assert payoff.phase is TrialPhase.OFF
    assert (payoff.speculates, payoff.attaches) == (False, False)


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
    rounds_of_phases(payoff, 4, 0.012, num_phases=2)
    assert payoff.attaches
    assert rounds_of_phases(payoff, 4, 0.012, num_phases=2) == [PLAIN_ROUNDS, BETWEEN_PLAIN]


def test_a_round_of_another_phase_is_no_evidence() -> None:
    payoff = Payoff()
    for _ in range(100):
        payoff.observe(False, 1, PLAIN_SECONDS)
    assert payoff.phase is TrialPhase.ON
    assert payoff.current.without.rounds == 0


def test_what_rounds_without_are_worth_is_forgotten_at_every_batch_size() -> None:
    payoff = Payoff()
    for num_rows in (1, 2, 4):
        for _ in range(STEADY_STEPS + 1):
            payoff.about_to_run(num_rows)
        rounds_of_phases(payoff, tokens=3, seconds=0.012, num_phases=2)
        assert payoff.current.without.rounds
    payoff.forget_without()
    for num_rows in (1, 2, 4):
        for _ in range(STEADY_STEPS + 1):
            payoff.about_to_run(num_rows)
        assert not payoff.current.without.rounds


def share_of_rounds_on(gain: float, seed: int, rounds: int) -> float:
    """Rounds give as many tokens with it as without, now one and now many, and are quicker."""
    dice, payoff, on = Random(seed), Payoff(), 0
    for _ in range(rounds):
        seconds = PLAIN_SECONDS * dice.uniform(0.9, 1.1) / (gain if payoff.speculates else 1)
        on += payoff.speculates
        payoff.observe(payoff.speculates, dice.choice([1, 1, 2, 3, 4, 5, 6, 6]), seconds)
    return on / rounds


@pytest.mark.parametrize(
    ("gain", "least", "most"),
    [(0.6, 0.0, 0.1), (0.85, 0.0, 0.25), (1.15, 0.8, 1.0), (1.5, 0.9, 1.0)],
)
def test_a_gain_is_found_among_rounds_that_give_one_token_or_many(
    gain: float, least: float, most: float
) -> None:
    shares = [share_of_rounds_on(gain, seed, 2000) for seed in range(share(20, 5))]
    assert least <= statistics.mean(shares) <= most


def test_a_rate_says_how_well_it_is_known() -> None:
    dice, values, errors = Random(1), [], []
    for _ in range(200):
        rate = Rate()
        for _ in range(50):
            rate.observe(dice.choice([1, 2, 6]), PLAIN_SECONDS)
        values.append(rate.value)
        errors.append(rate.error)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(values), rel=0.15)
    certain = Rate()
    for _ in range(5):
        certain.observe(1, PLAIN_SECONDS)
    assert certain.error == pytest.approx(0, abs=1e-3)
