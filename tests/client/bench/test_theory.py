"""The law that predicts a mode's speed, against rounds on a simulated clock."""

import random

import pytest

from ssd_client.bench.measure.theory import theorem7
from ssd_engine.speculation.fan_out import expected_tokens
from tests.engine.speculation.test_fan_out import run_round


@pytest.mark.parametrize(
    ("hits", "tree", "speed"),
    [
        (1.0, 0.7, 4 / 0.02),  # the tree is hidden: a round costs one verification
        (1.0, 1.5, 4 / 0.03),  # it takes longer than that
        (0.0, 0.7, 2 / 0.03),  # all misses: the backup comes on top
        (0.5, 0.7, (0.5 * 4 + 0.5 * 2) / (0.02 * (0.5 * 1 + 0.5 * 1.5))),
    ],
)
def test_theorem_7(hits: float, tree: float, speed: float) -> None:
    assert theorem7(hits, 4.0, 2.0, 0.02, tree, 0.5) == pytest.approx(speed)


def test_theorem_7_is_the_speed_of_a_simulated_clock() -> None:
    rng = random.Random(5)
    tokens = seconds = 0.0
    for _ in range(50_000):
        hit = rng.random() < 0.8
        tokens += run_round(rng, 0.7, 4 if hit else 2) + 1
        seconds += 0.01 * max(1.0, 1.2) if hit else 0.01 * (1 + 0.3)
    law = theorem7(0.8, expected_tokens(0.7, 4), expected_tokens(0.7, 2), 0.01, 1.2, 0.3)
    assert tokens / seconds == pytest.approx(law, rel=0.01)
