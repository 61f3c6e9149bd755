"""When `make bench-eagle` fails. That it runs is tested in ``test_readme.py``."""

import pytest

from ssd.v1 import target_pb2 as pb
from tools.bench_eagle import ENOUGH_ROUNDS, HEAD, Asked, problems
from tools.bench_kit import Generated

ASKED = Asked(["a"], 240, 3, 0.0)
TOKENS = list(range(3 * ENOUGH_ROUNDS + 1))


OTHERS, CACHED = "not plain decoding's", "found in the prefix cache"


def generated(rounds: int, tokens: list[int] = TOKENS, cached: int = 0) -> list[Generated]:
    return [Generated(tokens, 1.0, pb.SpeculationStats(rounds=rounds), "", cached)]


@pytest.mark.parametrize(
    ("sync", "offline", "said"),
    [
        (generated(ENOUGH_ROUNDS), 3.0, ""),
        (generated(ENOUGH_ROUNDS + 1), 3.0, ""),  # up to three percent
        (generated(ENOUGH_ROUNDS + 3), 3.0, "2.857 tokens a round, offline it is 3.000"),
        (generated(ENOUGH_ROUNDS - 1), 2.0, ""),  # few rounds tell little
        (generated(ENOUGH_ROUNDS, TOKENS[::-1]), 3.0, OTHERS),
        (generated(ENOUGH_ROUNDS, cached=16), 3.0, CACHED),
    ],
)
def test_what_is_wrong_is_named(sync: list[Generated], offline: float, said: str) -> None:
    found = list(problems(HEAD, ASKED, {"off": generated(0), "sync": sync}, offline))
    assert bool(found) == bool(said)
    assert said in "".join(found[:1])
