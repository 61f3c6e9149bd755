"""What a target's forwards tell of their rows reaches its reader: once, in order, and late enough
to be in nobody's way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
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
from tests.harness import Request, make_runner, run, submit
from tests.target.engine.devices import ROWS, Chained, Deferred, WrongDrafter, make_engine
from tests.target.engine.test_loops import make_requests, plain_texts, tokens_of

FIXED = SpeculationOptions(depth=ROWS - 1, adapt_depth=False, auto_off=False)
SYNC = SpeculationRequest(Mode.SYNC, depth=ROWS - 1)
BOUNDARIES = (0, 2)


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


class HeadInside(WrongDrafter):
    """It keeps where the rows were that it was told."""

    reads_features = True
    lacks: Mapping[int, range] = {}

    def __init__(self) -> None:
        self.told: dict[int, list[tuple[int, int]]] = {}
        self.held: set[int] = set()

    def take_features(self, sequence_id: int, start: int, rows: Tensor) -> None:
        self.told.setdefault(sequence_id, []).append((start, start + len(rows)))
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


@pytest.mark.parametrize("kind", [Deferred, Chained])
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "all rejected"])
def test_rows_are_told_when_the_next_round_is_launched(
    runner: ModelRunner, kind: type[Deferred], speculates: bool
) -> None:
    requests = make_requests(3, seed=5)
    texts = plain_texts(runner, requests)
    device, drafter = kind(runner), WrongDrafter() if speculates else None
    reader = Reader(FIXED, runner.config.vocab_size, drafter=drafter)
    reader.device = device
    if speculates:
        requests = [replace(each, speculation=SYNC) for each in requests]
    assert tokens_of(run(make_engine(device, reader), requests)) == texts
    assert_told(runner, reader, requests, texts)
    rounds = len(device.steps)
    assert device.beside > rounds // 2
    assert max(reader.launches) == rounds


@pytest.mark.parametrize("inside", [False, True], ids=["an endpoint reads", "a head inside"])
def test_what_a_resumed_request_computes_again_is_told(runner: ModelRunner, inside: bool) -> None:
    """Before it begins to speculate, too; and nothing is left of one that ends before."""
    (request,) = make_requests(1, seed=8)
    (whole,) = plain_texts(runner, [request])
    head, hidden = HeadInside(), runner.config.hidden_size
    feed = FeatureFeed(FeatureOptions(hidden), BOUNDARIES if inside else ())
    drafter: Any = head if inside else None
    speculator = SpeculationCoordinator(FIXED, runner.config.vocab_size, drafter=drafter, feed=feed)
    if not inside:
        terms = FeatureTerms(FeatureNeeds(BOUNDARIES, hidden, "float32"))
        speculator.endpoints.connected(DraftLinkUp(1, 1, False, 8, 2048, 5, features=terms))
    core = make_engine(Chained(runner), speculator)
    mode = SpeculationRequest(Mode.SYNC if inside else Mode.SSD, depth=2)
    resumed = replace(request, generated=whole[:7], speculation=mode)
    for number in range(2):
        core.handle(submit(number, resumed))
    while not speculator._sequences:
        assert core.scheduler.has_work
        core.step()
    core.step()
    if inside:
        ends = [end for _, end in head.told[0]]
        assert [start for start, _ in head.told[0]] == [0, *ends[:-1]]
        assert ends[-1] >= len(request.prompt) + 7 - 1
    else:
        text = feed._fed[0].text
        assert text.start == 0
        assert text.end >= len(request.prompt) + 7 - 1
    core.handle(submit(2, resumed))
    core.step()
    for number in range(3):
        core.handle(Cancel(number))
    while core.has_work:
        core.step()
    assert not feed._fed
    assert not head.held
