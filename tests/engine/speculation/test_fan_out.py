"""Fan-out, depth and the rates behind them."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssd_engine.speculation.fan_out import (
    AcceptanceRate,
    MissLaw,
    MissRate,
    choose_depth,
    expected_tokens,
    fan_out,
    uniform,
)
from tests.suite.scale import share

DEPTH = st.integers(0, 12)
BUDGET = st.integers(0, 500)
LAW = st.builds(MissLaw, st.floats(0.05, 0.95), st.floats(0.05, 4.0))


# Fan-out


def real_fan_out(depth: int, alpha: float, r: float, budget: int) -> list[float]:
    """Theorem 12 as it is printed, in real numbers."""
    f = [alpha ** (j / (1 + r)) for j in range(depth)]
    f.append(alpha ** (depth / (1 + r)) * (1 - alpha) ** (-1 / (1 + r)))
    return [budget * x / sum(f) for x in f]


def miss_rate(counts: Sequence[int], alpha: float, rejected: MissLaw, full: MissLaw) -> float:
    """Of a round: the chance of each outcome times that of a miss after it."""
    *inner, last = counts
    misses = sum(alpha**j * (1 - alpha) * rejected.miss(f) for j, f in enumerate(inner))
    return misses + alpha ** len(inner) * full.miss(last)


@given(st.integers(0, 3), st.floats(-1.0, 2.0), LAW, LAW, st.integers(0, 8))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_no_other_split_of_the_budget_misses_less(
    depth: int, alpha: float, rejected: MissLaw, full: MissLaw, budget: int
) -> None:
    # Where more candidates are better than the first one, a greedy choice need not be the best.
    assume(all(1 - law.first >= law.first - law.miss(2) for law in (rejected, full)))
    counts = fan_out(depth, alpha, rejected, full, budget)
    assert len(counts) == depth + 1
    assert sum(counts) == budget
    inner = min(max(alpha, 1e-3), 1 - 1e-3)
    best = min(
        miss_rate(split, inner, rejected, full)
        for split in product(range(budget + 1), repeat=depth + 1)
        if sum(split) == budget
    )
    assert miss_rate(counts, inner, rejected, full) <= best + 1e-12


@pytest.mark.parametrize(("alpha", "r"), [*product((0.3, 0.6, 0.9), (0.5, 1.0, 2.0))])
def test_with_one_law_and_many_candidates_it_is_theorem_12(alpha: float, r: float) -> None:
    law = MissLaw(0.4, r)
    counts = fan_out(4, alpha, law, law, 3000)
    assert sum(counts) == 3000
    assert counts == pytest.approx(real_fan_out(4, alpha, r, 3000), abs=2.5)


def test_an_outcome_that_is_full_leaves_the_rest_to_others() -> None:
    law = MissLaw(0.4, 1.0)
    bounded = fan_out(3, 0.9, law, law, 24, most=8)
    assert max(fan_out(3, 0.9, law, law, 24)) > max(bounded) == 8
    assert sum(bounded) == 24
    assert fan_out(1, 0.9, law, law, 24, most=8) == [8, 8]


@given(DEPTH, BUDGET)
@settings(max_examples=200, derandomize=True)
def test_a_uniform_fan_out_differs_by_one_at_most(depth: int, budget: int) -> None:
    counts = uniform(depth, budget)
    least, more = divmod(budget, depth + 1)
    assert counts == [least + 1] * more + [least] * (depth + 1 - more)


# Rates


def run_round(rng: random.Random, alpha: float, depth: int) -> int:
    accepted = 0
    while accepted < depth and rng.random() < alpha:
        accepted += 1
    return accepted


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_the_acceptance_rate_is_found_whatever_the_depth(alpha: float, depth: int) -> None:
    rng, rate = random.Random(1), AcceptanceRate(half_life=4000)
    for _ in range(20_000):
        rate.observe(run_round(rng, alpha, depth), depth)
    assert rate.value == pytest.approx(alpha, abs=0.02)


def test_the_acceptance_rate_starts_at_its_prior_and_forgets() -> None:
    rate = AcceptanceRate(prior=0.4, prior_tokens=10, half_life=50)
    assert rate.value == pytest.approx(0.4)
    rate.observe(0, 0)  # nothing was tried
    assert rate.value == pytest.approx(0.4)
    rate.observe(4, 4)
    assert rate.value == pytest.approx((4 + 4) / (10 + 4))
    for _ in range(200):
        rate.observe(0, 4)
    assert rate.value < 0.15  # the prior stays


def ranks(rng: random.Random, law: MissLaw, n: int) -> list[int]:
    """Ranks, from 0, with P(rank >= F) = first F^-r for F >= 1."""
    missed = (rng.random() < law.first for _ in range(n))
    return [int((1 - rng.random()) ** (-1 / law.r)) if miss else 0 for miss in missed]


PRIOR = MissLaw(0.5, 0.8)


@pytest.mark.parametrize("law", [MissLaw(0.9, 0.4), MissLaw(0.5, 1.0), MissLaw(0.2, 2.0)])
@pytest.mark.parametrize("ranked", [(4,), (16,), (10**6,), (1, 2, 5, 20)])
def test_the_law_is_found_however_many_candidates_were_ranked(
    law: MissLaw, ranked: tuple[int, ...]
) -> None:
    rng, estimate = random.Random(3), MissRate(PRIOR, half_life=5000)
    for rank in ranks(random.Random(2), law, 30_000):
        known = rng.choice(ranked)
        estimate.observe(rank if rank < known else None, known)
    assert estimate.law.first == pytest.approx(law.first, rel=0.06)
    assert estimate.law.r == pytest.approx(law.r, rel=0.1)


def test_the_law_starts_at_its_prior_forgets_and_stays_in_bounds() -> None:
    estimate = MissRate(PRIOR, half_life=50)
    assert (estimate.law.first, estimate.law.r) == pytest.approx((0.5, 0.8))
    estimate.observe(None, 0)  # says nothing
    assert (estimate.law.first, estimate.law.r) == pytest.approx((0.5, 0.8))
    for _ in range(500):
        estimate.observe(0, 256)
    assert estimate.law.first < 0.1
    for _ in range(500):
        estimate.observe(None, 256)
    assert estimate.law.first > 0.8
    assert estimate.law.r < 0.2


@given(st.lists(st.tuples(st.none() | st.integers(0, 300), st.integers(0, 300)), max_size=60))
@settings(max_examples=share(1000), derandomize=True, deadline=None)
def test_the_law_is_always_within_bounds(observed: list[tuple[int | None, int]]) -> None:
    estimate = MissRate(PRIOR, prior_ranks=1.0, half_life=5)
    for rank, ranked in observed:
        estimate.observe(rank, ranked)
    assert MissRate.LOWEST <= estimate.law.r <= MissRate.HIGHEST
    assert 0.0 < estimate.law.first <= MissRate.MOST


# Depth and speed


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_expected_tokens_are_those_of_the_rounds(alpha: float, depth: int) -> None:
    closed = sum(alpha**k for k in range(depth + 1))
    assert expected_tokens(alpha, depth) == pytest.approx(closed)


def test_the_depth_is_the_fastest_one() -> None:
    # alpha = 1/2: 1, 1.5, 1.75, 1.875 tokens for 1, 1.2, 1.4, 1.6 seconds: 1, 1.25, 1.25, 1.17
    assert choose_depth(0.5, lambda k: 1 + 0.2 * k, 3) == 1
    assert choose_depth(0.9, lambda k: 1.0, 8) == 8  # depth costs nothing
    assert choose_depth(0.0, lambda k: 1 + 0.01 * k, 8) == 0  # and brings nothing
    assert choose_depth(0.9, lambda k: 1.0 if k < 4 else 3.0, 8) == 3  # a step in the cost
    assert choose_depth(0.9, lambda k: 1.0, 0) == 0


def test_a_half_life_halves_what_was_seen() -> None:
    rate = AcceptanceRate(prior=0.5, prior_tokens=1e-9, half_life=3)
    for accepted, tried in [(3, 3), (0, 1), (0, 1), (0, 1)]:
        rate.observe(accepted, tried)
    later = sum(0.5 ** (i / 3) for i in range(3))
    assert rate.value == pytest.approx(3 / 2 / (3 / 2 + later))
