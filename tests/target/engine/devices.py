"""Devices that compute by themselves: a step's result is there some looks later."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from ssd_engine.execution.runner import ModelRunner
from ssd_engine.forward.batch import Chunk, Draw, Part
from ssd_engine.forward.result import ForwardResult, Score
from ssd_engine.kvcache.swap import Swap
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import SpeculationOptions
from ssd_target.scheduling.sequence import Sequence as TargetSequence
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.sync_drafter import DraftRow
from tests.harness import BLOCK
from tests.synchronous import DrawsNothing

ROWS = 4  # that a step can replay
CHUNK = 32


class Deferred(DrawsNothing):
    """A runner whose steps are computed when their result is asked for, some looks later."""

    asynchronous, chains = True, False
    gap_seconds = 0.0

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.config, self.num_blocks = runner.config, runner.num_blocks
        self.steps: list[list[Part]] = []
        self.prefilled: list[Part] = []
        self.in_flight = self.most_in_flight = self.beside = 0
        self.last: Flying | None = None

    @property
    def features(self) -> Tensor | None:
        return self.runner.features

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        return self.runner.prepare_watch(boundaries)

    def watch(self, boundaries: Sequence[int]) -> None:
        self.runner.watch(boundaries)

    @contextmanager
    def beside_forwards(self) -> Iterator[None]:
        self.beside += 1
        yield

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None], score: Score | None = None
    ) -> Tensor | None:
        self.prefilled += parts
        return self.runner.forward(parts, launched, score)

    def step(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], launched: Callable[[], None]
    ) -> "Flying":
        self.steps.append(list(parts))
        launched()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        kind = FlyingAhead if self.chains else Flying
        self.last = kind(self, list(parts), list(draws), self.last)
        return self.last


class Flying:
    """A step's features lie in a place that the step after the next one takes."""

    rows: Sequence[int] = ()

    def __init__(
        self,
        device: Deferred,
        parts: list[Part],
        draws: list[Draw | None],
        before: "Flying | None",
    ) -> None:
        self._device, self._parts, self._draws, self._before = device, parts, draws, before
        self._number, self._looks = len(device.steps), 0
        self._features: Tensor | None = None
        self._found: ForwardResult | None = None

    def done(self) -> bool:
        self._looks += 1
        return self._looks > 2

    def result(self) -> ForwardResult:
        self._device.in_flight -= 1
        return self.compute()

    def compute(self) -> ForwardResult:
        if self._found is None:
            self._found = replace(self._forward(), make_features=self._tell)
            self._features, self._before = self._device.features, None
        return self._found

    def _forward(self) -> ForwardResult:
        logits = self._device.runner.forward(self._parts)
        return ForwardResult(lambda: logits)

    def _tell(self) -> Tensor | None:
        assert len(self._device.steps) - self._number < 2, "another step is in their place"
        return self._features


class Chained(Deferred):
    """It also draws, and a step may name tokens of the step before it."""

    chains = True


class FlyingAhead(Flying):
    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        # As it is known now: it grows.
        self._histories = [
            None if draw is None or draw.history is None else [*draw.history.output]
            for draw in self._draws
        ]
        self.rows = range(len(self._draws))

    def _forward(self) -> ForwardResult:
        before = [] if self._before is None else self._before.compute().drawn or []
        parts = [_with_tokens(part, before) for part in self._parts]
        logits = self._device.runner.forward(parts)
        if logits is None:
            return ForwardResult(lambda: None, drawn=[], broken=[])
        runs = [
            part.tokens[: len(part.tokens) - part.num_logits + i + 1]
            for part in parts
            for i in range(part.num_logits)
        ]
        told = zip(self._draws, self._histories, runs, strict=True)
        rows = [_sample_row(*each) for each in told if each[0] is not None]
        drawn = sample(logits, rows)
        return ForwardResult(lambda: None, drawn=drawn, broken=[0] * len(drawn))


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
        self.runner.swap(swap)


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


def make_engine(
    device: Any,
    speculator: SpeculationCoordinator | None = None,
    replay_rows: int = ROWS,
    **options: Any,
) -> EngineCore:
    size = device.config.vocab_size
    plain = SpeculationCoordinator(SpeculationOptions(), size)
    table = [b""] * size
    return EngineCore(
        *(device, table, BLOCK, 8, CHUNK, speculator or plain, replay_rows), **options
    )


def make_speculator(
    runner: ModelRunner, drafter: Any, depth: int = 3, **options: Any
) -> SpeculationCoordinator:
    """With a draft inside, and a fixed depth."""
    fixed = SpeculationOptions(depth=depth, adapt_depth=False, **options)
    return SpeculationCoordinator(fixed, runner.config.vocab_size, drafter=drafter)
