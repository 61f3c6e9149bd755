"""The branches of a head are those that rows in a line give, told in time, late, or in part."""

import random
from pathlib import Path

import pytest

from tests.draft.speculators.head.head_oracle import HeadOracle
from tests.draft.speculators.head.head_world import BUDGET, DEPTH, HeadWorld, Pair, Told
from tests.random_heads import KINDS, make_head
from tests.suite.scale import full_only

ROUNDS = 6
QUICK = ("llama-two-layers", "llama-norm-output")


@pytest.fixture(
    scope="module", params=[kind if kind in QUICK else full_only(kind) for kind in KINDS]
)
def pair(
    request: pytest.FixtureRequest, random_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    directory = tmp_path_factory.mktemp("head")
    make_head(KINDS[request.param], directory)
    return Pair(random_target, directory)


def compare(world: HeadWorld, told: Told, oracle: HeadOracle) -> None:
    """Every branch of the round."""
    branches = world.sequence(told.key).branches
    assert len(branches) == BUDGET
    for accepted, token in branches:
        assert token in oracle.foreseen(accepted, BUDGET)
        pushed = world.pushed[told.key, told.round, accepted, token]
        assert pushed == oracle.branch(accepted, token, DEPTH)


def take_branch(world: HeadWorld, told: Told, oracle: HeadOracle, rng: random.Random) -> None:
    """The round ends in an outcome that was prepared for; some of its tokens are taken."""
    accepted, token = rng.choice(sorted(world.sequence(told.key).branches))
    count = rng.randint(1, DEPTH)
    world.decide(told, accepted, token)
    world.launch(told, (accepted, token), count)
    assert told.speculation == oracle.take(accepted, token, count)


def begin_told(pair: Pair) -> tuple[HeadWorld, HeadOracle, Told]:
    """A sequence whose prompt was told."""
    world, oracle = HeadWorld(pair), HeadOracle(pair.make_head())
    told = world.open()
    world.settle()
    assert not world.pushed
    world.tell(told)
    world.settle()
    oracle.launch(told.tokens, [], 0, told.features(0, told.num_told))
    compare(world, told, oracle)
    return world, oracle, told


@pytest.mark.parametrize(
    ("steps", "patient"),
    [(0, False), (0, True), (1, True), (2, True)],
    ids=["in time", "with time to read the chain", "as the tree begins", "while it begins"],
)
def test_features_of_the_last_round(pair: Pair, steps: int, patient: bool) -> None:
    """Told before the tree, or after so many steps: then it begins again, as nobody has seen it.

    With time to spare the chain goes on from what was told."""
    rng = random.Random(1 + steps)
    world, oracle, told = begin_told(pair)
    launch = oracle.launch_patiently if patient else oracle.launch
    world.verify_micros = 1_000_000 * patient
    for _ in range(ROUNDS):
        begin = told.num_told
        take_branch(world, told, oracle, rng)
        world.step(steps)
        world.tell(told)
        world.settle()
        launch(told.tokens, told.speculation, begin, told.features(begin, told.num_told))
        compare(world, told, oracle)


def test_features_that_are_late_by_a_round(pair: Pair) -> None:
    """The head goes on from its own states, and computes them again when it is told."""
    rng = random.Random(2)
    world, oracle, told = begin_told(pair)
    read = told.num_told
    for _ in range(ROUNDS):
        take_branch(world, told, oracle, rng)
        world.settle()
        begin, rows = len(told.tokens) - 2, None  # the last committed one, for its logits
        if told.num_told > read:
            begin, rows = read, told.features(read, told.num_told)
        oracle.launch(told.tokens, told.speculation, begin, rows)
        compare(world, told, oracle)
        read = told.num_told
        world.tell(told)
