"""When `make bench-eagle` fails. That it runs is tested in ``test_readme.py``."""

from ssd.v1 import target_pb2 as pb
from tools.bench_eagle import ENOUGH_ROUNDS, HEAD, Asked, problems
from tools.bench_kit import Generated

ASKED = Asked(["a"], 240, 3, 0.0)
TOKENS = list(range(3 * ENOUGH_ROUNDS + 1))


def generated(rounds: int, tokens: list[int] = TOKENS, cached: int = 0) -> list[Generated]:
    return [Generated(tokens, 1.0, pb.SpeculationStats(rounds=rounds), "", cached)]


def found(sync: list[Generated], offline: float = 3.0) -> list[str]:
    return list(problems(HEAD, ASKED, {"off": generated(0), "sync": sync}, offline))


def test_sync_may_be_three_percent_off_the_offline_evaluation() -> None:
    assert found(generated(ENOUGH_ROUNDS)) == []
    assert found(generated(ENOUGH_ROUNDS + 1)) == []
    [problem] = found(generated(ENOUGH_ROUNDS + 3))
    assert problem.endswith("sync has 2.857 tokens a round, offline it is 3.000")


def test_few_rounds_tell_little() -> None:
    assert found(generated(ENOUGH_ROUNDS - 1), offline=2.0) == []


def test_other_texts_and_cached_prompts_are_named() -> None:
    assert "not plain decoding's" in found(generated(ENOUGH_ROUNDS, TOKENS[::-1]))[0]
    assert "found in the prefix cache" in found(generated(ENOUGH_ROUNDS, cached=16))[0]
