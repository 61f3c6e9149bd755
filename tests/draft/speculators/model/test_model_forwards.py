"""A device that computes by itself: a tree's next depth is launched before this one is seen."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssd_draft.engine.core import DraftCore
from ssd_draft.planning.plan import Planner
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Branches, Launch, Open, Outcome, Source
from ssd_engine.speculation.verification import Verification
from ssd_engine.text.token_ids import pack_tokens
from tests.harness import BLOCK, make_runner
from tests.ranking_runner import Ranking
from tests.suite.scale import full_only

DEPTH, BUDGET = 4, 8


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield make_runner(resolve_model("stories-draft"))


class World:
    """One link; all that was pushed, as one book of branches."""

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
        # A clock of its own: on a busy machine frames may wait for the next step.
        clock = itertools.count(0.0, 1e-6).__next__
        self.core = DraftCore(
            speculator, lambda depth: Planner(DEPTH, BUDGET), 4, None, 64, 64, clock=clock
        )
        self.core.handle(TargetLinkUp(1, 12))
        self.pushed: dict[tuple[int, int, int, int], list[int]] = {}
        self.rounds = dict.fromkeys(range(1, sequences + 1), 0)
        for key in self.rounds:
            prompt = pack_tokens([5 + (key + i) % 50 for i in range(30)])
            params = SamplingParams(**{"seed": key, "temperature": (0.0, 1.0)[key % 2], **sampling})
            frame = Open(key, 0, prompt, b"", [], 200, params, verification, 0.5, DEPTH, 0)
            self.core.handle(TargetFrames(1, [frame]))

    def step(self, times: int) -> None:
        for _ in range(times):
            for link in self.core.step().links:
                for frame in link.frames:
                    if isinstance(frame, Branches):
                        self._book(frame)
            self.core.check_integrity()

    def _book(self, frame: Branches) -> None:
        for b in frame.branches:
            tokens = self.pushed.setdefault((frame.sequence, frame.round, b.accepted, b.token), [])
            assert b.start == len(tokens)
            tokens += b.tokens

    def advance(self, key: int, rng: random.Random) -> None:
        """The target ends the round in one of the offered outcomes, and takes what is there."""
        sequence = self.core._links[1].sequences[key]
        branches = sorted(sequence.branches.values(), key=lambda o: (o.accepted, o.token))
        if not branches:
            return
        branch = rng.choice(branches)
        outcome = Outcome(key, self.rounds[key], branch.accepted, branch.token)
        taken = self.pushed.get((key, self.rounds[key], branch.accepted, branch.token), [])
        self.rounds[key] += 1
        source = Source.CACHE if taken else Source.NONE
        launch = Launch(key, self.rounds[key], taken[:DEPTH], source, DEPTH, 0)
        self.core.handle(TargetFrames(1, [outcome, launch]))

    def miss(self, key: int, token: int) -> Outcome:
        """The round ends in an outcome that was hardly foreseen, and the target waits."""
        outcome = Outcome(key, self.rounds[key], 0, token)
        self.core.handle(TargetFrames(1, [outcome]))
        return outcome

    def go_on(self, key: int, outcome: Outcome) -> None:
        """With what was drafted for it meanwhile."""
        taken = self.pushed[key, outcome.round, 0, outcome.token][:DEPTH]
        self.rounds[key] += 1
        launch = Launch(key, self.rounds[key], taken, Source.JUST_IN_TIME, DEPTH, 0)
        self.core.handle(TargetFrames(1, [launch]))


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


@pytest.mark.parametrize("sequences", [1, 2])
def test_what_is_pushed_is_what_one_depth_after_the_other_gives(
    runner: ModelRunner, sequences: int
) -> None:
    books = []
    for chains in (False, True):
        books.append(pushed_in_rounds(World(runner, chains, sequences), chains))
    assert books[0] == books[1]


PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=1.5)


@pytest.mark.parametrize("sequences", [full_only(1), 2])
def test_branches_are_guessed_under_penalties_wherever_that_is(
    runner: ModelRunner, sequences: int
) -> None:
    """By the device, one depth ahead or not, as by who looks at its logits."""
    books = []
    for chains, ranks in ((False, False), (False, True), (True, True)):
        world = World(
            runner,
            chains,
            sequences,
            ranks,
            temperature=0.0,
            logit_bias=((20, 1.5), (30, -2.0)),
            **PENALTIES,
        )
        books.append(pushed_in_rounds(world, chains))
    assert books[0] == books[1] == books[2]
    assert any(len(tokens) == DEPTH for tokens in books[0].values())


@pytest.mark.parametrize("sequences", [full_only(1), 2])
def test_branches_are_drawn_for_rejection_wherever_that_is(
    runner: ModelRunner, sequences: int
) -> None:
    """And what they were drawn from is kept for the branch that is taken."""
    books, shipped = [], []
    for chains, ranks in ((False, False), (True, True)):
        how = dict(temperature=1.0, top_p=0.9)
        world = World(runner, chains, sequences, ranks, Verification.REJECTION, **how)
        books.append(pushed_in_rounds(world, chains))
        world.advance(1, random.Random(4))
        link = world.core._links[1]
        world.core._follower._follow(link, link.inbox.popleft())  # the outcome, not yet the launch
        make = world.core._speculator.draft_distributions(link.sequences[1], DEPTH)
        assert make is not None
        shipped.append(make())
    assert books[0] == books[1]
    assert any(len(tokens) == DEPTH for tokens in books[0].values())
    assert torch.equal(shipped[0], shipped[1])


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
    world.core._room.close(world.core._links[1], world.core._links[1].sequences[1])
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


def test_trees_are_planned_by_how_long_their_own_steps_take(runner: ModelRunner) -> None:
    """Not by the first of a round, which may wait for a forward that is of no use any more, nor by
    those that the target waits for, which have the device to themselves."""
    world = World(runner, True, 1)
    speculator = world.core._speculator

    def typical(steps: int) -> list[bool]:
        return [(world.step(1), speculator.is_typical)[1] for _ in range(steps)]

    assert typical(4) == [False, False, True, True]  # the prompt, the first of the tree
    outcome = world.miss(1, 40)
    assert typical(3) == [False] * 3
    world.go_on(1, outcome)
    assert typical(3) == [False, False, True]


def test_without_a_device_of_its_own_every_step_tells_how_long_steps_take(
    runner: ModelRunner,
) -> None:
    world = World(runner, False, 1)
    world.step(3)
    assert world.core._speculator.is_typical
