"""A device that computes by itself: a round is in flight while its sequences go on living."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_target.engine.synthetic_verifier import SyntheticVerifier
from ssd_target.records.engine_records import Cancel
from ssd_target.records.speculation_options import Mode, SpeculationRequest
from ssd_target.scheduling.kept_kv import KeptOptions
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.sync_drafter import DraftRow
from tests.harness import Request, Result, make_core, make_runner, run, submit
from tests.suite.scale import full_only
from tests.target.engine.devices import (
    CHUNK,
    ROWS,
    Chained,
    Deferred,
    InOrder,
    WrongDrafter,
    make_engine,
    make_speculator,
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(resolve_model("stories-target"))


def make_requests(count: int, seed: int, max_tokens: int = 12, longest: int = 90) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(4096) for _ in range(rng.randint(1, longest))],
            SamplingParams(rng.getrandbits(64), rng.choice((0.0, 1.0))),
            max_tokens=max_tokens,
        )
        for _ in range(count)
    ]


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def plain_texts(runner: ModelRunner, requests: list[Request]) -> list[list[int]]:
    """Of rounds that are waited for."""
    plain = [replace(request, speculation=SpeculationRequest()) for request in requests]
    return tokens_of(run(make_core(runner), plain))


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7}


@pytest.mark.parametrize(
    ("kind", "stagger", "penalties"),
    [
        (Deferred, 2, {}),
        (Chained, 2, {}),
        (Chained, 0, PENALTIES),
        full_only(Chained, 0, {}),
        full_only(Chained, 5, {}),
    ],
)
def test_rounds_that_are_in_flight_change_no_text(
    runner: ModelRunner, kind: type[Deferred], stagger: int, penalties: dict[str, float]
) -> None:
    """Some end at a token that nobody could foresee, others come while a round is ahead, and
    penalties see the token that only the device knows."""
    requests = [
        replace(each, sampling=replace(each.sampling, **penalties))  # type: ignore[arg-type]
        for each in make_requests(6, seed=1)
    ]
    expected = plain_texts(runner, requests)
    for i in (1, 4):
        requests[i] = replace(requests[i], stop_ids=frozenset({expected[i][5]}))
    device = kind(runner)
    core = make_engine(device)
    assert tokens_of(run(core, requests, stagger)) == plain_texts(runner, requests)
    assert device.most_in_flight == (2 if device.chains else 1)
    assert not core.has_work
    assert core.stats().used_blocks == 0


@pytest.mark.parametrize(
    ("replay_rows", "kept"), [(ROWS, 0), (ROWS, 4), full_only(0, 0), full_only(0, 4)]
)
def test_those_that_are_set_aside_in_flight_have_their_text(
    runner: ModelRunner, replay_rows: int, kept: int
) -> None:
    """A round that was launched ahead is in vain for them; what it wrote is nobody's."""
    requests = make_requests(5, seed=4, max_tokens=40, longest=20)
    expected = plain_texts(runner, requests)
    device = InOrder(runner)
    runner.host_copies.allocate(kept)
    device.num_blocks = 9
    options = KeptOptions(kept, 0.0) if kept else None
    speculator = make_speculator(runner, None, depth=1)
    core = make_engine(device, speculator, replay_rows, kept=options)
    assert tokens_of(run(core, requests)) == expected
    stats = core.stats()
    assert stats.set_aside >= 2
    assert bool(stats.swapped_out) == bool(kept)
    assert stats.used_blocks == 0
    assert device.most_in_flight == 2
    assert not speculator._sequences


class RightDrafter(WrongDrafter):
    """It has the texts."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def draft(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            begin = len(row.sequence.output)
            row.tokens = self._texts[row.sequence.id][begin : begin + row.depth]


class Alternating(Payoff):
    """Is turned on and off; keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__(enabled=True)
        self.on, self.shown = True, list[tuple[bool, int]]()

    @property
    def speculates(self) -> bool:
        return self.on

    def observe(self, speculated: bool, tokens: int, row_seconds: float) -> None:
        self.shown.append((speculated, tokens))


def test_rounds_are_launched_ahead_for_as_long_as_plain_ones_are_chosen(
    runner: ModelRunner,
) -> None:
    """Of sequences that may speculate. What a round has shown, those ahead included, counts for
    the phase that it was launched in."""
    auto = SpeculationRequest(Mode.AUTO, depth=3)
    requests = [replace(each, speculation=auto) for each in make_requests(2, 1, max_tokens=40)]
    expected = plain_texts(runner, requests)
    speculator = make_speculator(runner, RightDrafter(expected))
    assert speculator._sync is not None
    speculator._sync.payoff = payoff = Alternating()
    device = Chained(runner)
    core = make_engine(device, speculator)
    for i, request in enumerate(requests):
        core.handle(submit(i, request))
    tokens: list[list[int]] = [[], []]
    in_flight: dict[bool, int] = {True: 0, False: 0}
    for step in itertools.count():
        if not core.has_work:
            break
        payoff.on = step % 8 > 4
        for delta in core.step().deltas:
            tokens[delta.sequence] += delta.tokens
        in_flight[payoff.on] = max(in_flight[payoff.on], device.in_flight)
        core.check_integrity()
    assert tokens == expected
    assert in_flight == {True: 1, False: 2}
    totals = speculator.totals
    assert len(payoff.shown) == totals.rounds == totals.sync_rounds + totals.plain_rounds
    assert {count for on, count in payoff.shown if not on} == {1}
    of_drafts = [count for on, count in payoff.shown if on]
    assert len(of_drafts) == totals.rounds_in(Mode.SYNC)
    assert of_drafts.count(4) >= len(of_drafts) - 2  # but the last ones


def test_outcomes_that_are_made_up_are_not_foreseen_by_the_device(runner: ModelRunner) -> None:
    """It would go on with the token that it has drawn itself. All guesses are taken for right."""
    requests = make_requests(2, seed=6)
    speculator = make_speculator(runner, WrongDrafter(), auto_off=False)
    device = Chained(runner)
    core = make_engine(device, speculator, verify=SyntheticVerifier(1.0, speculator))
    assert tokens_of(run(core, requests)) == plain_texts(runner, requests)  # nothing was guessed
    sync = SpeculationRequest(Mode.SYNC, depth=3)
    for made_up in run(core, [replace(request, speculation=sync) for request in requests]):
        assert made_up.tokens[1:4] == [4095] * 3
        assert made_up.speculation is not None
        assert made_up.speculation.accepted_tokens == made_up.speculation.drafted_tokens > 0
    assert device.most_in_flight == 1


@pytest.mark.parametrize("kind", [Deferred, Chained])
def test_a_sequence_that_is_cancelled_in_flight_is_free_at_once_and_says_no_more(
    runner: ModelRunner, kind: type[Deferred]
) -> None:
    core = make_engine(kind(runner))
    for i, request in enumerate(make_requests(3, seed=2)):
        core.handle(submit(i, request))
    said, before = [0, 0, 0], 0
    for step in itertools.count():
        if not core.has_work:
            break
        if step == 6:
            core.handle(Cancel(1))
            assert core.stats().running == 2
            before = said[1]
        core.check_integrity()
        for delta in core.step().deltas:
            said[delta.sequence] += len(delta.tokens)
    assert said == [12, before, 12]
    assert before < 12
    assert core.stats().used_blocks == 0


def random_prompt(length: int) -> list[int]:
    return [random.Random(4).randrange(4096) for _ in range(length)]


def test_only_whole_chunks_of_prompts_are_shared(runner: ModelRunner) -> None:
    device, prompt = Deferred(runner), random_prompt(CHUNK + 20)
    core = make_engine(device)
    (first,) = run(core, [Request(prompt, max_tokens=40)])
    longer = Request(prompt + first.tokens + [5, 6, 7], max_tokens=8)  # the next turn of a chat
    (second,) = run(core, [longer])
    assert [second.tokens] == plain_texts(runner, [longer])
    assert second.cached_tokens == CHUNK
    assert all(part.start % CHUNK == 0 for part in device.prefilled)


def test_a_resumed_sequence_takes_nothing_from_the_cache_beyond_its_prompt(
    runner: ModelRunner,
) -> None:
    """There the same tokens may lie as another's prompt, with other bits."""
    core, prompt = make_engine(Deferred(runner)), random_prompt(CHUNK)
    (whole,) = run(core, [Request(prompt, max_tokens=2 * CHUNK)])
    run(core, [Request(prompt + whole.tokens, max_tokens=2)])
    resumed = Request(prompt, max_tokens=2 * CHUNK, generated=whole.tokens[: CHUNK + 5])
    (rest,) = run(core, [resumed])
    assert rest.tokens == whole.tokens[CHUNK + 5 :]
    assert rest.cached_tokens < CHUNK
