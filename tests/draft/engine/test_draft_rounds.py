"""A draft model's rounds, told frame by frame: what is computed, pushed and held."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_draft.planning.plan import FILL, IN_TIME, LATE, RANKS, Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_draft.speculators.model.speculator import ModelSpeculator
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, KVCopy, Part
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import (
    Branches,
    Close,
    DraftFrame,
    Launch,
    Notice,
    Outcome,
    Source,
    TargetFrame,
    Verification,
)
from ssd_engine.speculation.latency_model import StepClock
from tests.draft.told_draft import ToldDraft, opened
from tests.harness import BLOCK, make_runner
from tests.random_models import make_model

DEPTH, BUDGET = 4, 6


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model("qwen3", directory)
    with torch.backends.mkldnn.flags(enabled=False):
        yield make_runner(directory)


class Watched:
    """A runner that remembers what it was asked for."""

    chains = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks
        self.forwards: list[list[Part]] = []

    def step(self, parts: list[Part], *rest: Any) -> Any:
        self.forwards.append(list(parts))
        return self._runner.step(parts, *rest)


class Draft(ToldDraft):
    """One link with one sequence; a target's forward takes a second, and the draft's no time."""

    def __init__(self, runner: ModelRunner, max_context: int = 256) -> None:
        self.runner = Watched(runner)
        speculator = ModelSpeculator(self.runner, BLOCK, max_context, DEPTH, BUDGET)
        self.planner = Planner(DEPTH, BUDGET)
        self.now = 0.0
        super().__init__(speculator, lambda depth: self.planner, clock=lambda: self.now)
        self.round = 0

    def open(self, prompt: int, max_tokens: int, depth: int) -> list[DraftFrame]:
        tokens = [5 + i % 50 for i in range(prompt)]
        return self.tell(opened(1, tokens, max_tokens=max_tokens, depth=depth))

    def tell(self, *frames: TargetFrame, steps: int = 20) -> list[DraftFrame]:
        self.runner.forwards.clear()
        self.now += 1.0
        self.send(*frames)
        return self.step(steps)

    def hit(self) -> tuple[Outcome, list[int]]:
        branch = max(self.sequence().branches.values(), key=lambda o: (o.accepted, len(o.tokens)))
        return Outcome(1, self.round, branch.accepted, branch.token), branch.tokens

    def launch(self, tokens: list[int], source: Source, depth: int) -> Launch:
        self.round += 1
        return Launch(1, self.round, tokens, source, depth, 0)


def longest(said: list[DraftFrame]) -> int:
    pushed = [b for frame in said if isinstance(frame, Branches) for b in frame.branches]
    return max(branch.start + len(branch.tokens) for branch in pushed)


def test_after_a_hit_nothing_is_computed_again(runner: ModelRunner) -> None:
    draft = Draft(runner)
    draft.open(prompt=30, max_tokens=200, depth=DEPTH)
    for _ in range(5):
        outcome, tokens = draft.hit()
        draft.tell(outcome, draft.launch(tokens[:DEPTH], Source.CACHE, DEPTH))
        first = draft.runner.forwards[0]
        assert isinstance(first[0], KVCopy)
        assert not [p for parts in draft.runner.forwards for p in parts if isinstance(p, Chunk)]
        assert len(draft.runner.forwards) == DEPTH + 1


def test_what_was_moved_is_what_would_have_been_computed(runner: ModelRunner) -> None:
    """Rounds of hits, and of misses with the same text, prepare for the same outcomes."""
    texts = []
    for source in (Source.CACHE, Source.NGRAM):
        draft = Draft(runner)
        draft.open(prompt=30, max_tokens=200, depth=DEPTH)
        branches = []
        for _ in range(6):
            outcome, tokens = draft.hit()
            launch = draft.launch(tokens[:DEPTH], source, DEPTH)
            if source is Source.NGRAM:  # as if it had never been drafted
                draft.sequence().branches.clear()
                draft.sequence().state.drafting = None
            draft.tell(outcome, launch)
            best = max(draft.sequence().branches.values(), key=lambda o: o.accepted)
            branches.append((best.accepted, best.token, best.tokens))
        texts.append(branches)
    assert texts[0] == texts[1]


def test_a_prefix_is_cached_for_its_own_link_alone(runner: ModelRunner) -> None:
    """What one link has had computed is not to be noticed on another."""
    draft, rows = Draft(runner), []
    draft.core.handle(TargetLinkUp(2, DEPTH))
    for key, link in enumerate((1, 1, 2)):
        before = draft.core.counters.rows
        draft.core.handle(TargetFrames(link, [opened(key, range(5, 105), depth=1)]))
        draft.step(20)
        draft.core.handle(TargetFrames(link, [Close(key, 0)]))
        rows.append(draft.core.counters.rows - before)
    first, again, elsewhere = rows
    assert again < 50
    assert first == elsewhere >= 100


@pytest.mark.parametrize(("asked", "pushed"), [(2, 2), (DEPTH, DEPTH), (12, DEPTH)])
def test_no_more_is_pushed_than_is_of_use(runner: ModelRunner, asked: int, pushed: int) -> None:
    draft = Draft(runner)
    assert longest(draft.open(prompt=30, max_tokens=200, depth=asked)) == pushed
    outcome, tokens = draft.hit()
    said = draft.tell(outcome, draft.launch(tokens[:pushed], Source.CACHE, asked))
    assert longest(said) == pushed
    assert not [frame for frame in said if isinstance(frame, Notice)]


@pytest.mark.parametrize(
    ("prompts", "max_context", "more"),
    [(range(50, 64), 64, 150), (range(20, 20 + BLOCK), 256, 1)],
    ids=["at the end of the context", "asked for more than it was opened for"],
)
def test_a_path_does_not_go_beyond_its_room(
    runner: ModelRunner, prompts: range, max_context: int, more: int
) -> None:
    for prompt in prompts:
        draft = Draft(runner, max_context)
        draft.open(prompt, max_tokens=prompt + more, depth=DEPTH)
        if draft.sequence().branches:
            outcome, _ = draft.hit()
            draft.tell(outcome)  # and no launch: it goes on with that path


@pytest.mark.parametrize(
    ("taken", "source", "wanted", "late"),
    [
        (DEPTH, Source.CACHE, DEPTH, False),
        (2, Source.CACHE, DEPTH, True),
        (DEPTH, Source.JUST_IN_TIME, DEPTH, True),
        (0, Source.NONE, DEPTH, True),
        (2, Source.CACHE, 2, False),  # no more was wanted
        (0, Source.NONE, 0, False),
    ],
)
def test_trees_are_narrower_after_one_that_was_late(
    runner: ModelRunner, taken: int, source: Source, wanted: int, late: bool
) -> None:
    draft = Draft(runner)
    draft.open(prompt=30, max_tokens=200, depth=DEPTH)
    fill = draft.planner._fill
    outcome, tokens = draft.hit()
    draft.tell(outcome, draft.launch(tokens[:1], Source.CACHE, DEPTH))
    assert fill[Verification.COUPLED] == FILL  # that tree had to wait for the prompt
    outcome, tokens = draft.hit()
    draft.tell(outcome, draft.launch(tokens[:taken], source, wanted))
    assert fill[Verification.COUPLED] == pytest.approx(FILL - LATE if late else FILL + IN_TIME)
    assert fill[Verification.REJECTION] == FILL  # its steps take another time


IN_A_HURRY = opened(sampling=SamplingParams(0, 1.0), depth=DEPTH, verify_micros=4800)


def fill_after(*late: bool) -> float:
    planner, sequence = Planner(DEPTH, BUDGET), DraftSequence(1, IN_A_HURRY, 0.0, DEPTH)
    for each in late:
        planner.observe_use(sequence, each)
    return planner._fill[Verification.COUPLED]


def test_branches_that_are_late_in_a_row_count_for_more_but_not_for_long() -> None:
    assert fill_after(True, True, False, True) == pytest.approx(FILL - 4 * LATE + IN_TIME)
    assert fill_after(*[True] * 8, *[False] * 30) >= FILL


def test_no_outcome_has_more_branches_than_guesses_are_ranked() -> None:
    """More would have to be ranked anew, on the host: each step of such a tree took 25 ms."""
    sequence = DraftSequence(1, IN_A_HURRY, 0.0, DEPTH)  # without a speculation: one outcome
    plan = Planner(DEPTH, 2 * RANKS).plan(sequence, StepClock(), others=0)
    assert plan.fan_out == [RANKS]
    assert plan.ranks == RANKS + 1


@pytest.mark.parametrize(("per_row", "depth", "width"), [(0.0, 3, BUDGET), (0.4e-3, 1, 2)])
def test_a_tree_that_takes_too_long_loses_what_costs_time(
    per_row: float, depth: int, width: int
) -> None:
    """Depth where every forward takes long; width only where rows do."""
    clock = StepClock()
    for rows in (1, 4, 16):
        clock.observe(rows, 1e-3 + per_row * rows)
    plan = Planner(DEPTH, BUDGET).plan(DraftSequence(1, IN_A_HURRY, 0.0, DEPTH), clock, others=0)
    assert (plan.depth, sum(plan.fan_out)) == (depth, width)
