"""A device that computes by itself: a round is in flight while its sequences go on living."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from torch import Tensor

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Draw, Part
from ssd_engine.forward.result import ForwardResult, Score
from ssd_engine.kvcache.swap import Swap
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from ssd_target.engine.core import EngineCore
from ssd_target.engine.synthetic_verifier import SyntheticVerifier
from ssd_target.records.engine_records import Cancel
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.scheduling.kept_kv import KeptOptions
from ssd_target.scheduling.sequence import Sequence as TargetSequence
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.sync_drafter import DraftRow, SyncDrafter
from tests.harness import BLOCK, Request, make_core, make_runner, run, submit
from tests.suite.scale import full_only
from tests.synchronous import DrawsNothing
from tools.gpu import engines
from tools.gpu.engines import PerfectDraft

ROWS = 4  # that a step can replay
CHUNK = 32


class Deferred(DrawsNothing):
    """A runner whose steps are computed when their result is asked for, some looks later."""

    asynchronous, chains = True, False
    gap_seconds = 0.0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.config, self.num_blocks = runner.config, runner.num_blocks
        self.steps: list[list[Part]] = []
        self.prefills: list[list[Part]] = []

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None], score: Score | None = None
    ) -> Tensor | None:
        self.prefills.append(list(parts))
        return self._runner.forward(parts, launched, score)

    def step(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], launched: Callable[[], None]
    ) -> "Flying":
        self.steps.append(list(parts))
        launched()
        return Flying(self._runner, list(parts))


class Flying:
    rows: Sequence[int] = ()

    def __init__(self, runner: ModelRunner, parts: list[Part]) -> None:
        self._runner, self._parts, self._looks = runner, parts, 0

    def done(self) -> bool:
        self._looks += 1
        return self._looks > 2

    def result(self) -> ForwardResult:
        logits = self._runner.forward(self._parts)
        return ForwardResult(lambda: logits)


class Chained(Deferred):
    """It also draws, and a step may name tokens of the step before it."""

    chains = True

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.last: FlyingAhead | None = None
        self.most_in_flight = self.in_flight = 0

    def step(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], launched: Callable[[], None]
    ) -> "FlyingAhead":
        self.steps.append(list(parts))
        launched()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.last = FlyingAhead(self, list(parts), list(draws), self.last)
        return self.last


class FlyingAhead(Flying):
    def __init__(
        self,
        device: Chained,
        parts: list[Part],
        draws: list[Draw | None],
        before: "FlyingAhead | None",
    ) -> None:
        super().__init__(device._runner, parts)
        self._device, self._draws, self._before = device, draws, before
        # As it is known now: it grows.
        self._histories = [
            None if draw is None or draw.history is None else [*draw.history.output]
            for draw in draws
        ]
        self._computed = False
        self.drawn: list[int] = []
        self.rows = range(len(draws))

    def compute(self) -> None:
        if self._computed:
            return
        self._computed = True
        if self._before is not None:
            self._before.compute()
        before = [] if self._before is None else self._before.drawn
        parts = [_with_tokens(part, before) for part in self._parts]
        logits = self._runner.forward(parts)
        if logits is None:
            return
        runs = [
            part.tokens[: len(part.tokens) - part.num_logits + i + 1]
            for part in parts
            for i in range(part.num_logits)
        ]
        told = zip(self._draws, self._histories, runs, strict=True)
        rows = [_sample_row(*each) for each in told if each[0] is not None]
        self.drawn, self._before = sample(logits, rows), None

    def result(self) -> ForwardResult:
        if self._before is not None:
            self._before.compute()
        self.compute()
        self._device.in_flight -= 1
        return ForwardResult(lambda: None, drawn=self.drawn, broken=[0] * len(self.drawn))


def _sample_row(draw: Draw, said: list[int] | None, run: Sequence[int]) -> SampleRow:
    if draw.history is None or said is None:
        return SampleRow(SamplingParams(draw.seed, draw.temperature), (), range(draw.position))
    recent = run[len(run) - draw.recent :]
    row = SampleRow(draw.history.params, draw.history.prompt, [*said, *recent])
    assert row.position == draw.position
    return row


def _with_tokens(part: Part, before: Sequence[int]) -> Part:
    assert isinstance(part, Chunk)
    tokens = [before[-token - 1] if token < 0 else token for token in part.tokens]
    return Chunk(tokens, part.start, part.blocks, part.num_logits)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(resolve_model("stories-target"))


def make_deferred(
    runner: ModelRunner, replay_rows: int = ROWS, kind: type[Deferred] = Deferred
) -> tuple[EngineCore, Deferred]:
    deferred = kind(runner)
    size = runner.config.vocab_size
    speculator = SpeculationCoordinator(SpeculationOptions(), size)
    core = EngineCore(deferred, [b""] * size, BLOCK, 8, CHUNK, speculator, replay_rows=replay_rows)
    return core, deferred


def make_requests(count: int, seed: int, max_tokens: int = 12) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(4096) for _ in range(rng.randint(1, 90))],
            SamplingParams(rng.getrandbits(64), rng.choice((0.0, 1.0))),
            max_tokens=max_tokens,
        )
        for _ in range(count)
    ]


def test_texts_are_those_of_rounds_that_are_waited_for(runner: ModelRunner) -> None:
    requests = make_requests(6, seed=1)
    core, _ = make_deferred(runner)
    expected = run(make_core(runner), requests)
    got = run(core, requests, stagger=2)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert not core.has_work


@pytest.mark.parametrize("stagger", [full_only(0), 2, full_only(5)])
def test_rounds_that_are_launched_ahead_change_no_text(runner: ModelRunner, stagger: int) -> None:
    """Some end at a token that nobody could foresee, others come while a round is ahead."""
    requests = make_requests(6, seed=1)
    expected = [one.tokens for one in run(make_core(runner), requests)]
    for i in (1, 4):
        stop = expected[i][5]
        requests[i] = replace(requests[i], stop_ids=frozenset({stop}))
    expected = [one.tokens for one in run(make_core(runner), requests)]
    core, device = make_deferred(runner, kind=Chained)
    got = run(core, requests, stagger=stagger)
    assert [one.tokens for one in got] == expected
    assert isinstance(device, Chained)
    assert device.most_in_flight == 2
    assert not core.has_work
    assert core.stats().used_blocks == 0
    core.check_integrity()


class InOrder(Chained):
    """What was launched first is computed first, prefills included."""

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None], score: Score | None = None
    ) -> Tensor | None:
        if self.last is not None:
            self.last.compute()
        return super().forward(parts, launched, score)

    def swap(self, swap: Swap) -> None:
        if self.last is not None:
            self.last.compute()
        self._runner.swap(swap)


@pytest.mark.parametrize(
    ("replay_rows", "kept"), [(ROWS, 0), (ROWS, 4), full_only(0, 0), full_only(0, 4)]
)
def test_those_that_are_set_aside_in_flight_have_their_text(
    runner: ModelRunner, replay_rows: int, kept: int
) -> None:
    """A round that was launched ahead is in vain for them; what it wrote is nobody's."""
    requests = make_requests(5, seed=4, max_tokens=40)
    requests = [replace(request, prompt=request.prompt[:20]) for request in requests]
    expected = [one.tokens for one in run(make_core(runner), requests)]
    device = InOrder(runner)
    runner.host_copies.allocate(kept)
    device.num_blocks = 9
    size = runner.config.vocab_size
    speculator = SpeculationCoordinator(SpeculationOptions(depth=1), size)
    core = EngineCore(
        *(device, [b""] * size, BLOCK, 8, CHUNK, speculator),
        replay_rows=replay_rows,
        kept=KeptOptions(kept, 0.0) if kept else None,
    )
    got = run(core, requests)
    assert [one.tokens for one in got] == expected
    assert core.stats().set_aside >= 2
    assert bool(core.stats().swapped_out) == bool(kept)
    assert device.most_in_flight == 2
    assert core.stats().used_blocks == 0
    assert not core.speculator._sequences


class WrongDrafter:
    """Its tokens are never right."""

    reads_features = False

    def is_behind(self, sequence: TargetSequence) -> bool:
        return False

    def draft(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            row.tokens = [4095] * row.depth

    def end(self, sequence_id: int) -> None: ...

    def check_integrity(self) -> None: ...


def test_rounds_are_launched_ahead_for_as_long_as_plain_ones_are_chosen(
    runner: ModelRunner,
) -> None:
    """Of sequences that may speculate; the ones ahead are evidence, too."""
    requests = make_requests(2, seed=1)
    expected = [one.tokens for one in run(make_core(runner), requests)]
    size = runner.config.vocab_size
    drafter = cast(SyncDrafter, WrongDrafter())
    options = SpeculationOptions(depth=3, adapt_depth=False)
    speculator = SpeculationCoordinator(options, size, drafter=drafter)
    assert speculator._sync is not None
    speculator._sync.payoff = payoff = Alternating()
    device = Chained(runner)
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, speculator, replay_rows=ROWS)
    for i, request in enumerate(requests):
        core.handle(submit(i, replace(request, speculation=SpeculationRequest(Mode.AUTO, depth=3))))
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
    rounds = speculator.totals.rounds
    assert rounds == speculator.totals.sync_rounds + speculator.totals.plain_rounds
    assert len(payoff.shown) == rounds
    assert sum(on for on, _ in payoff.shown) == speculator.totals.rounds_in(Mode.SYNC)


def test_penalties_see_the_token_that_only_the_device_knows(runner: ModelRunner) -> None:
    requests = make_requests(3, seed=3)
    penalised = [
        replace(
            each, sampling=replace(each.sampling, repetition_penalty=1.3, frequency_penalty=0.7)
        )
        for each in requests
    ]
    expected = [result.tokens for result in run(make_core(runner), penalised)]
    assert expected != [result.tokens for result in run(make_core(runner), requests)]
    core, device = make_deferred(runner, kind=Chained)
    assert [result.tokens for result in run(core, penalised)] == expected
    assert isinstance(device, Chained)
    assert device.most_in_flight == 2


def test_outcomes_that_are_made_up_are_not_foreseen_by_the_device(runner: ModelRunner) -> None:
    """It would go on with the token that it has drawn itself. All guesses are taken for right."""
    requests = make_requests(2, seed=6)
    size = runner.config.vocab_size
    speculator = SpeculationCoordinator(
        SpeculationOptions(depth=3, adapt_depth=False, auto_off=False),
        size,
        drafter=cast(SyncDrafter, WrongDrafter()),
    )
    device, synthetic = Chained(runner), SyntheticVerifier(1.0, speculator)
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, speculator, ROWS, verify=synthetic)
    expected = [one.tokens for one in run(make_core(runner), requests)]
    assert [one.tokens for one in run(core, requests)] == expected  # nothing was guessed
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
    requests = make_requests(3, seed=2)
    core, _ = make_deferred(runner, kind=kind)
    for i, request in enumerate(requests):
        core.handle(submit(i, request))
    said: dict[int, int] = dict.fromkeys(range(3), 0)
    for step in range(40):
        if step == 6:
            core.handle(Cancel(1))
            assert core.stats().running == 2
            core.check_integrity()
            before = said[1]
        for delta in core.step().deltas:
            said[delta.sequence] += len(delta.tokens)
        core.check_integrity()
    assert not core.has_work
    assert said[1] == before < 12
    assert said[0] == said[2] == 12
    assert core.stats().used_blocks == 0


def test_generated_tokens_are_replayed_in_steps_and_the_text_goes_on(runner: ModelRunner) -> None:
    """Not prefilled: their KV comes from forwards like those that it came from at first."""
    for request in make_requests(3, seed=3):
        (whole,) = run(make_core(runner), [request])
        for known in (1, 2, 7, 11):
            core, deferred = make_deferred(runner)
            resumed = replace(request, generated=whole.tokens[:known])
            (rest,) = run(core, [resumed])
            assert rest.tokens == whole.tokens[known:]
            prefilled = sum(len(part.tokens) for parts in deferred.prefills for part in parts)
            assert prefilled == len(request.prompt)
            stepped = [part for parts in deferred.steps for part in parts]
            assert all(len(part.tokens) <= ROWS for part in stepped)
            replayed = [part for part in stepped if not part.num_logits]
            assert sum(len(part.tokens) for part in replayed) == known - 1


def test_only_whole_chunks_of_prompts_are_shared(runner: ModelRunner) -> None:
    core, deferred = make_deferred(runner)
    rng = random.Random(4)
    prompt = [rng.randrange(4096) for _ in range(CHUNK + 20)]
    (first,) = run(core, [Request(prompt, max_tokens=40)])
    longer = prompt + first.tokens + [5, 6, 7]  # as the next turn of a chat
    (expected,) = run(make_core(runner), [Request(longer, max_tokens=8)])
    (second,) = run(core, [Request(longer, max_tokens=8)])
    assert second.tokens == expected.tokens
    assert second.cached_tokens == CHUNK
    starts = [
        part.start for parts in deferred.prefills for part in parts if isinstance(part, Chunk)
    ]
    assert all(start % CHUNK == 0 for start in starts)


def test_a_resumed_sequence_takes_nothing_from_the_cache_beyond_its_prompt(
    runner: ModelRunner,
) -> None:
    """There the same tokens may lie as another's prompt, with other bits."""
    core, _ = make_deferred(runner)
    rng = random.Random(5)
    prompt = [rng.randrange(4096) for _ in range(CHUNK)]
    (whole,) = run(core, [Request(prompt, max_tokens=2 * CHUNK)])
    run(core, [Request(prompt + whole.tokens, max_tokens=2)])
    resumed = Request(prompt, max_tokens=2 * CHUNK, generated=whole.tokens[: CHUNK + 5])
    (rest,) = run(core, [resumed])
    assert rest.tokens == whole.tokens[CHUNK + 5 :]
    assert rest.cached_tokens < CHUNK


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


def test_what_a_round_has_shown_counts_for_the_phase_it_was_launched_in(
    runner: ModelRunner,
) -> None:
    prompt = list(range(40, 60))
    (plain,) = run(make_core(runner), [Request(prompt, max_tokens=40)])
    draft = PerfectDraft(3)
    size = runner.config.vocab_size
    options = SpeculationOptions(depth=3, adapt_depth=False)
    speculator = SpeculationCoordinator(options, size, send=draft.send)
    core = EngineCore(Deferred(runner), [b""] * size, BLOCK, 8, CHUNK, speculator, replay_rows=ROWS)
    draft.core, draft.texts[0] = core, prompt + plain.tokens
    core.handle(draft.up())
    (endpoint,) = speculator.endpoints
    endpoint.payoff = payoff = Alternating()
    engines.submit(core, 0, prompt, 40, mode=Mode.SSD)
    tokens: list[int] = []
    for step in itertools.count():
        if not core.has_work:
            break
        payoff.on = step % 4 > 1
        for delta in core.step().deltas:
            tokens += delta.tokens
    assert tokens == plain.tokens
    # A speculated round here gives four tokens, but for the last one, a plain one gives one.
    assert {count for on, count in payoff.shown if not on} == {1}
    assert [count for on, count in payoff.shown if on][:-1].count(4) >= 3
    assert all(count == 4 for on, count in [s for s in payoff.shown if s[0]][:-1])
