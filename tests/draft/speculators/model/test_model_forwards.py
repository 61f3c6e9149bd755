"""A device that computes by itself: a tree's next depth is launched before this one is seen."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssd_draft.planning.plan import Planner
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Launch, Outcome, Source
from ssd_engine.speculation.verification import Verification
from tests.draft.told_draft import ToldDraft, opened
from tests.harness import BLOCK, make_runner
from tests.ranking_runner import Ranking
from tests.suite.scale import full_only

DEPTH, BUDGET = 4, 8


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield make_runner(resolve_model("stories-draft"))


class World(ToldDraft):
    """Sequences that a runner drafts for, and a target that ends their rounds."""

    def __init__(
        self,
        runner: ModelRunner,
        chains: bool,
        sequences: int,
        ranks: bool = True,
        verification: Verification = Verification.COUPLED,
        **sampling: Any,
    ) -> None:
        self.runner = Ranking(runner, chains, ranks)
        speculator = ModelSpeculator(self.runner, BLOCK, 256, DEPTH, BUDGET)
        super().__init__(speculator, lambda depth: Planner(DEPTH, BUDGET))
        self.rounds = dict.fromkeys(range(1, sequences + 1), 0)
        for key in self.rounds:
            prompt = [5 + (key + i) % 50 for i in range(30)]
            params = SamplingParams(**{"seed": key, "temperature": (0.0, 1.0)[key % 2], **sampling})
            self.send(opened(key, prompt, sampling=params, verification=verification, depth=DEPTH))

    def advance(self, key: int, rng: random.Random) -> None:
        """The target ends the round in one of the offered outcomes, and takes what is there."""
        sequence = self.sequence(key)
        branches = sorted(sequence.branches.values(), key=lambda o: (o.accepted, o.token))
        if not branches:
            return
        branch = rng.choice(branches)
        outcome = Outcome(key, self.rounds[key], branch.accepted, branch.token)
        taken = self.pushed.get((key, self.rounds[key], branch.accepted, branch.token), [])
        self.rounds[key] += 1
        source = Source.CACHE if taken else Source.NONE
        launch = Launch(key, self.rounds[key], taken[:DEPTH], source, DEPTH, 0)
        self.send(outcome, launch)

    def miss(self, key: int, token: int) -> Outcome:
        """The round ends in an outcome that was hardly foreseen, and the target waits."""
        outcome = Outcome(key, self.rounds[key], 0, token)
        self.send(outcome)
        return outcome

    def go_on(self, key: int, outcome: Outcome) -> None:
        """With what was drafted for it meanwhile."""
        taken = self.pushed[key, outcome.round, 0, outcome.token][:DEPTH]
        self.rounds[key] += 1
        launch = Launch(key, self.rounds[key], taken, Source.JUST_IN_TIME, DEPTH, 0)
        self.send(launch)


def pushed_in_rounds(world: World, chains: bool) -> Any:
    """What a draft pushes in rounds that end when all is ready."""
    rng = random.Random(3)
    for _ in range(6):
        world.step(14)
        for key in world.rounds:
            world.advance(key, rng)
    world.step(14)
    assert (world.runner.followed > 10) is chains
    assert (world.runner.deepened > 5) is chains
    return world.pushed


PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=1.5)
BIASED = dict(temperature=0.0, logit_bias=((20, 1.5), (30, -2.0)), **PENALTIES)
BY_HOST, BY_DEVICE = (False, False), [(False, True), (True, True)]  # chains, and ranks
DRAWN = dict(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize("sequences", [full_only(1), 2])
@pytest.mark.parametrize(
    ("verification", "sampling", "ways"),
    [
        (Verification.COUPLED, {}, BY_DEVICE),
        (Verification.COUPLED, BIASED, [BY_HOST, *BY_DEVICE]),
        (Verification.REJECTION, DRAWN, [BY_HOST, *BY_DEVICE]),
    ],
    ids=["coupled", "penalties", "rejection"],
)
def test_what_is_pushed_is_the_same_wherever_it_is_guessed(
    runner: ModelRunner,
    sequences: int,
    verification: Verification,
    sampling: dict[str, Any],
    ways: list[tuple[bool, bool]],
) -> None:
    """By the device, one depth ahead or not, as by who looks at its logits; and what branches were
    drawn from is kept for the one that is taken."""
    books, shipped = [], []
    for chains, ranks in ways:
        world = World(runner, chains, sequences, ranks, verification, **sampling)
        books.append(pushed_in_rounds(world, chains))
        world.advance(1, random.Random(4))
        link = world.core._links[1]
        world.core._follower._follow(link, link.inbox.popleft())  # the outcome, not yet the launch
        make = world.core._speculator.draft_distributions(link.sequences[1], DEPTH)
        assert (make is None) is (verification is Verification.COUPLED)
        shipped.append(torch.empty(0) if make is None else make())
    assert all(book == books[0] for book in books)
    assert any(len(tokens) == DEPTH for tokens in books[0].values())
    assert all(torch.equal(each, shipped[0]) for each in shipped)


def test_rounds_that_end_in_the_middle_of_a_tree_lose_nothing(runner: ModelRunner) -> None:
    """What was launched ahead for the old tree is never taken for the new one's."""
    own_cache = make_runner(resolve_model("stories-draft"))
    world, plain = World(runner, True, 2), World(own_cache, False, 2)
    rng = random.Random(5)
    for _ in range(25):
        steps, key = rng.randrange(1, 6), rng.choice((1, 2))
        world.step(steps)
        plain.step(steps)
        for each in (world, plain):
            each.advance(key, random.Random(0))
    assert len(world.pushed) > 100
    assert world.pushed == plain.pushed
    assert any(not flight.seen for flight in world.runner.launched)  # some were for nothing


def test_a_sequence_that_is_closed_in_flight_is_gone(runner: ModelRunner) -> None:
    world = World(runner, True, 1)
    world.step(3)
    world.core._room.close(world.core._links[1], world.sequence(1))
    world.step(3)
    world.core.check_integrity()
    assert world.core.stats().used_blocks == 0


@pytest.mark.parametrize(
    ("verification", "sampling"),
    [
        (Verification.COUPLED, PENALTIES),
        full_only(Verification.COUPLED, {}),
        (Verification.REJECTION, dict(temperature=1.0, top_p=0.9)),
    ],
)
def test_a_path_that_is_waited_for_is_drafted_in_a_chain(
    runner: ModelRunner, verification: Verification, sampling: dict[str, Any]
) -> None:
    """What follows an outcome that was not foreseen; the round after it begins with that."""
    books = []
    for chains in (False, True):
        world = World(runner, chains, 2, verification=verification, **sampling)
        for number in range(4):
            world.step(14)
            told = {key: world.miss(key, 70 + number) for key in world.rounds}
            before = world.runner.deepened
            world.step(9)
            assert (world.runner.deepened > before) is chains
            for key, outcome in told.items():
                world.go_on(key, outcome)
        world.step(14)
        books.append(world.pushed)
    assert books[0] == books[1]
    assert sum(len(tokens) == DEPTH for tokens in books[0].values()) >= 8
