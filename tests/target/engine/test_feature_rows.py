"""What a target's forwards tell of their rows reaches its reader: once, in order, and late enough
to be in nobody's way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Draw, Part
from ssd_engine.forward.result import ForwardResult
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_target.engine.core import EngineCore
from ssd_target.records.engine_records import Cancel, DraftLinkUp
from ssd_target.records.speculation_options import (
    FeatureOptions,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.sync_drafter import Drafter, SyncDrafter
from tests.harness import BLOCK, Request, make_core, make_runner, run, submit
from tests.target.engine.test_loops import (
    CHUNK,
    ROWS,
    Chained,
    Deferred,
    Flying,
    FlyingAhead,
    WrongDrafter,
    make_requests,
)

BOUNDARIES = (0, 2)


class Telling:
    """A step's features, in a place that the step after the next one takes."""

    def __init__(self, device: "Deferred | Chained", number: int) -> None:
        self._device, self._number = device, number
        self.features: Tensor | None = None

    def __call__(self) -> Tensor | None:
        assert len(self._device.steps) - self._number <= 2, "another step is in their place"
        return self.features


class TellingDevice(Deferred):
    """It computes by itself, and tells what is watched."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.beside = 0

    @property
    def features(self) -> Tensor | None:
        return self._runner.features

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        return self._runner.prepare_watch(boundaries)

    def watch(self, boundaries: Sequence[int]) -> None:
        self._runner.watch(boundaries)

    @contextmanager
    def beside_forwards(self) -> Iterator[None]:
        self.beside += 1
        yield

    def step(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], launched: Callable[[], None]
    ) -> "Flying":
        telling = Telling(self, len(self.steps))
        return self._telling(super().step(parts, draws, launched), telling)

    def _telling(self, flying: Any, telling: Telling) -> Any:
        result, runner = flying.result, self._runner

        def told() -> ForwardResult:
            found = result()
            telling.features = runner.features
            return ForwardResult(found.make_logits, make_features=telling)

        flying.result = told
        return flying


class TellingAhead(TellingDevice, Chained):
    """Steps are launched ahead, too."""

    def _telling(self, flying: Any, telling: Telling) -> Any:
        assert isinstance(flying, FlyingAhead)
        compute, result, runner = flying.compute, flying.result, self._runner

        def computed() -> None:
            if not flying._computed:
                compute()
                telling.features = runner.features

        def told() -> ForwardResult:
            found = result()
            return ForwardResult(
                found.make_logits,
                drawn=found.drawn,
                broken=found.broken,
                make_features=telling,
            )

        flying.compute, flying.result = computed, told  # type: ignore[method-assign]
        return flying


class Reader(SpeculationCoordinator):
    """A linked draft that reads features."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self.told: dict[int, list[tuple[int, Tensor]]] = {}
        self.launches: list[int] = []
        self.device: Deferred | None = None

    @property
    def reads_features(self) -> bool:
        return True

    def tell_features(self, works: Sequence[Work], features: Tensor | None) -> None:
        assert features is not None
        if self.device is not None:
            self.launches.append(len(self.device.steps))
        begin = 0
        for work in works:
            rows = features[begin : begin + len(work.chunk.tokens)]
            begin += len(work.chunk.tokens)
            right = rows[: work.sequence.num_committed - 1 - work.chunk.start]
            if not work.is_over:
                self.told.setdefault(work.sequence.id, []).append((work.chunk.start, right.clone()))
        assert begin == len(features)


class Heard(WrongDrafter):
    """A head inside that keeps where the rows were that it was told."""

    reads_features = True
    lacks: Mapping[int, range] = {}

    def __init__(self) -> None:
        self.told: dict[int, list[tuple[int, int]]] = {}
        self.held: set[int] = set()

    def take_features(self, sequence_id: int, start: int, rows: Tensor) -> None:
        self.told.setdefault(sequence_id, []).append((start, len(rows)))
        self.held.add(sequence_id)

    def end(self, sequence_id: int) -> None:
        self.held.discard(sequence_id)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = make_runner(resolve_model("stories-target"))
    runner.watch(BOUNDARIES)
    yield runner
    runner.watch(())


def assert_told(runner: ModelRunner, reader: Reader, requests: list[Request], texts: Any) -> None:
    """All of every text but what the round that ended it has told, each position once."""
    for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
        begun, whole = reader.told[number], [*request.prompt, *text]
        ends = [start + len(rows) for start, rows in begun]
        assert [start for start, _ in begun] == [0, *ends[:-1]]
        assert ends[-1] >= len(whole) - 2 - ROWS
        got = torch.cat([rows for _, rows in begun])
        runner.forward([Chunk(whole[: len(got)], 0, list(range(20)), 1)])
        assert runner.features is not None
        torch.testing.assert_close(got, runner.features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [TellingDevice, TellingAhead])
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "all rejected"])
def test_rows_are_told_when_the_next_round_is_launched(
    runner: ModelRunner, kind: type[TellingDevice], speculates: bool
) -> None:
    requests = make_requests(3, seed=5)
    texts = [each.tokens for each in run(make_core(runner), requests)]
    device, size = kind(runner), runner.config.vocab_size
    options = SpeculationOptions(depth=ROWS - 1, adapt_depth=False, auto_off=False)
    drafter = cast(SyncDrafter, WrongDrafter()) if speculates else None
    reader = Reader(options, size, drafter=drafter)
    reader.device = device
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, reader, replay_rows=ROWS)
    if speculates:
        sync = SpeculationRequest(Mode.SYNC, depth=ROWS - 1)
        requests = [Request(r.prompt, r.sampling, 12, speculation=sync) for r in requests]
    assert [each.tokens for each in run(core, requests)] == texts
    assert_told(runner, reader, requests, texts)
    rounds = len(device.steps)
    assert device.beside > rounds // 2
    assert max(reader.launches) == rounds


def test_a_draft_inside_is_told_before_it_drafts(runner: ModelRunner) -> None:
    class Inside(WrongDrafter):
        reads_features = True
        lacks: Mapping[int, range] = {}

        def draft(self, rows: Sequence[Any]) -> None:
            for row in rows:
                begun = reader.told[row.sequence.id]
                start, last = begun[-1]
                assert start + len(last) == row.sequence.num_committed - 1
            super().draft(rows)

    requests = make_requests(2, seed=6)
    texts = [each.tokens for each in run(make_core(runner), requests)]
    device, size = TellingDevice(runner), runner.config.vocab_size
    options = SpeculationOptions(depth=2, adapt_depth=False, auto_off=False)
    reader = Reader(options, size, drafter=cast(SyncDrafter, Inside()))
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, reader, replay_rows=ROWS)
    sync = SpeculationRequest(Mode.SYNC, depth=2)
    asked = [Request(r.prompt, r.sampling, 12, speculation=sync) for r in requests]
    assert [each.tokens for each in run(core, asked)] == texts
    assert device.beside == 0


@pytest.mark.parametrize("inside", [False, True], ids=["an endpoint reads", "a head inside"])
def test_what_a_resumed_request_computes_again_is_told(runner: ModelRunner, inside: bool) -> None:
    """Before it begins to speculate, too; and nothing is left of one that ends before."""
    (request,) = make_requests(1, seed=8)
    (whole,) = run(make_core(runner), [request])
    size, heard = runner.config.vocab_size, Heard()
    drafter = cast(Drafter, heard) if inside else None
    kinds = FeatureOptions(runner.config.hidden_size)
    feed = FeatureFeed(kinds, BOUNDARIES if inside else ())
    options = SpeculationOptions(depth=2, adapt_depth=False, auto_off=False)
    speculator = SpeculationCoordinator(options, size, drafter=drafter, feed=feed)
    if not inside:
        needs = FeatureNeeds(BOUNDARIES, runner.config.hidden_size, "float32")
        up = DraftLinkUp(1, 1, False, 8, 2048, 5, features=FeatureTerms(needs))
        speculator.endpoints.connected(up)
    device = TellingAhead(runner)
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, speculator, replay_rows=ROWS)
    mode = SpeculationRequest(Mode.SYNC if inside else Mode.SSD, depth=2)
    prompt, generated = request.prompt, whole.tokens[:7]
    resumed = Request(prompt, request.sampling, 12, generated=generated, speculation=mode)
    for number in range(2):
        core.handle(submit(number, resumed))
    while not speculator._sequences:
        assert core.scheduler.has_work
        core.step()
    core.step()
    if inside:
        told = [start for start, _ in heard.told[0]]
        ends = [start + count for start, count in heard.told[0]]
        assert told == [0, *ends[:-1]]
        assert ends[-1] >= len(prompt) + 7 - 1
    else:
        text = feed._fed[0].text
        assert text.start == 0
        assert text.end >= len(prompt) + 7 - 1
    core.handle(submit(2, resumed))
    core.step()
    for number in range(3):
        core.handle(Cancel(number))
    while core.has_work:
        core.step()
    assert not feed._fed
    assert not heard.held


def test_generated_tokens_that_are_read_again_are_told(runner: ModelRunner) -> None:
    """A request that is resumed: its tokens are replayed in steps."""
    (request,) = make_requests(1, seed=7)
    (whole,) = run(make_core(runner), [request])
    device, size = TellingAhead(runner), runner.config.vocab_size
    reader = Reader(SpeculationOptions(), size)
    core = EngineCore(device, [b""] * size, BLOCK, 8, CHUNK, reader, replay_rows=ROWS)
    resumed = Request(request.prompt, request.sampling, 12, generated=whole.tokens[:7])
    (rest,) = run(core, [resumed])
    assert rest.tokens == whole.tokens[7:]
    assert_told(runner, reader, [request], [whole.tokens])
