"""Rows before a prefix hit are computed once more for heads: a window of them, piece by piece, in
blocks of nobody, and only where nothing is in the way."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.result import ImmediateForward
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.speculation.frames import FeatureRequest
from ssd_engine.tracing.events import NoTrace
from ssd_target.engine.core import EngineCore
from ssd_target.engine.reread import PATIENCE, RereadForward
from ssd_target.records.engine_records import Cancel, DraftFrames, DraftLinkUp
from ssd_target.records.speculation_options import (
    FeatureOptions,
    Mode,
    SpeculationOptions,
    SpeculationRequest,
)
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.head_drafter import HeadDrafter
from tests.harness import Request, submit
from tests.synchronous import ByForward
from tests.target.speculation.endpoints.test_feature_feed import HIDDEN, Kept

BLOCK, CHUNK, VOCAB = 4, 32, 16
PROMPT = [i % VOCAB for i in range(100)]
CACHED = 96  # tokens of it, when it is asked for again
BOUNDARIES, INSIDE = (1, 3), (2,)


class Telling(ByForward):
    """Of position p at boundary b, it tells 1000 b + p."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, self._forward)
        self.features: Tensor | None = None
        self.chunks: list[Chunk] = []
        self.boundaries: tuple[int, ...] = ()
        self.on_forward: Callable[[Chunk], None] = lambda chunk: None

    def prepare_watch(self, boundaries: tuple[int, ...]) -> bool:
        return True

    def watch(self, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries

    def beside_forwards(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _forward(self, parts: list[Part], launched: Callable[[], None], *_: Any) -> Tensor:
        launched()
        chunks = [cast(Chunk, part) for part in parts]
        self.chunks += chunks
        for chunk in chunks:
            self.on_forward(chunk)
        if self.boundaries:
            positions = torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.end)])
            told = torch.tensor(self.boundaries).repeat_interleave(HIDDEN) * 1000.0
            self.features = positions.unsqueeze(1) + told
        logits = torch.zeros(sum(chunk.num_logits for chunk in chunks), VOCAB)
        logits[:, 5] = 1.0
        return logits

    def step(self, parts: list[Any], draws: list[Any], *launched: Any) -> ImmediateForward:
        return ImmediateForward(lambda: self._forward(parts, *launched), lambda: self.features)


class Target:
    """A target whose prefix cache holds ``PROMPT``, and an endpoint that reads all it is told."""

    def __init__(self, num_blocks: int = 128, window: int = 64, inside: bool = False) -> None:
        self.runner = Telling(num_blocks)
        drafter = None
        if inside:
            head: Any = SimpleNamespace(num_blocks=64, chains=False)
            drafter = HeadDrafter(head, BLOCK, 2 * window, 3, CHUNK)
        self.drafter: Any = drafter
        self.feed = FeatureFeed(FeatureOptions(HIDDEN, window), INSIDE if inside else ())
        self.speculator = SpeculationCoordinator(
            SpeculationOptions(depth=3, auto_off=inside),
            VOCAB,
            drafter=drafter,
            feed=self.feed,
            clock=lambda: 0.0,
        )
        self.core = EngineCore(self.runner, [b""] * VOCAB, BLOCK, 8, CHUNK, self.speculator)
        self.sender = self.link()
        self.submit(0, PROMPT, Mode.OFF, 2)
        while self.core.has_work:
            self.step()
        self.runner.chunks.clear()

    @property
    def pool(self) -> Any:
        return self.core.scheduler.pool

    def link(self) -> Kept:
        needs = FeatureNeeds(BOUNDARIES, HIDDEN, "float32")
        up = DraftLinkUp(1, 1, False, 8, 2048, 3, features=FeatureTerms(needs))
        self.core.handle_link(up)
        sender = Kept(needs)
        next(iter(self.speculator.endpoints)).features = sender
        return sender

    def submit(self, number: int, prompt: list[int], mode: Mode = Mode.SSD, most: int = 40) -> None:
        asked = Request(prompt, max_tokens=most, speculation=SpeculationRequest(mode, depth=3))
        self.core.handle(submit(number, asked))

    def begin(self, number: int, mode: Mode = Mode.SSD) -> None:
        """A sequence with a prefix hit; its endpoint asks for all of it."""
        self.submit(number, PROMPT, mode)
        self.step()
        if mode is Mode.SSD:
            frames = DraftFrames(1, 1, [FeatureRequest(number, 0, 0)], None)
            self.core.handle_link(frames)

    def step(self, checked: bool = True) -> list[Chunk]:
        """Returns what was computed once more."""
        before = len(self.runner.chunks)
        self.core.step()
        if checked:
            self.core.check_integrity()
        return [each for each in self.runner.chunks[before:] if each.end <= CACHED]

    def sequence(self, number: int) -> Sequence:
        return self.core.scheduler._running[number]

    def set_aside(self, number: int) -> None:
        self.core.scheduler._set_aside(self.sequence(number))

    def steps(self, count: int) -> list[Chunk]:
        return [chunk for _ in range(count) for chunk in self.step()]

    def told(self, number: int) -> list[int]:
        """Positions, all of whose rows are right."""
        positions = []
        for key, rows in self.sender.sent:
            if key.sequence == number:
                at = [*range(key.round, key.round + len(rows))]
                assert rows[:, ::HIDDEN].tolist() == [[1000.0 + p, 3000.0 + p] for p in at]
                positions += at
        return positions


def spans(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]


def test_a_window_is_computed_once_more_from_its_end_on() -> None:
    """It is written where nobody reads."""
    target = Target(window=64)

    def check(chunk: Chunk) -> None:
        if chunk.end <= CACHED:
            blocks, begin = target.sequence(1).blocks, chunk.start // BLOCK
            written = chunk.blocks[begin:]
            assert len(written) == -(-len(chunk.tokens) // BLOCK)
            assert set(written) <= set(target.pool._empty)
            assert chunk.blocks[:begin] == blocks[:begin]
            assert chunk.tokens == PROMPT[chunk.start : chunk.end]

    target.runner.on_forward = check
    target.begin(1)
    cached = target.pool.num_cached
    assert spans(target.steps(8)) == [(64, 96), (36, 64)]
    assert target.pool.num_cached >= cached
    told = target.told(1)
    assert told == [*range(36, 36 + len(told))]
    assert told[-1] > len(PROMPT)
    assert target.feed.counters.reread == 60
    assert target.feed.counters.missed == 36  # they are before the window
    assert not target.feed.lacks


def test_where_there_is_no_room_it_is_given_up() -> None:
    """The head begins where new tokens do."""
    target = Target(num_blocks=40)
    target.begin(1)
    held = target.pool.open((), (target.pool.num_available - 6) * BLOCK)
    assert held is not None
    for _ in range(2):
        assert not target.step(checked=False)  # the lease is nobody's
    assert not target.feed.lacks
    held.release()
    assert target.steps(3) == []
    assert target.told(1)[0] == target.feed.counters.missed == CACHED


@pytest.mark.parametrize("how", ["cancelled", "set aside", "left"])
def test_nothing_is_computed_for_who_is_gone(how: str) -> None:
    target = Target()
    target.begin(1)
    target.begin(2)
    assert set(target.feed.lacks) == {1}
    assert spans(target.step()) == [(64, 96)]
    assert set(target.feed.lacks) == {1, 2}
    if how == "cancelled":
        target.core.handle(Cancel(1))
    elif how == "set aside":
        sequence = target.sequence(1)
        target.set_aside(1)
        target.speculator.set_aside(sequence)
    else:
        target.speculator.endpoints.leave(target.speculator._sequences[1], "a test")
    assert set(target.feed.lacks) == {2}
    blocks = target.sequence(2).blocks
    chunks = target.steps(4)
    assert spans(chunks)[:2] == [(64, 96), (36, 64)]
    assert all(chunk.blocks[:9] == blocks[:9] for chunk in chunks[:2])
    assert target.told(2)[0] == 36


def test_prompts_go_first_but_not_for_ever() -> None:
    target = Target(num_blocks=512)
    target.begin(1)
    target.submit(2, [7] * (CHUNK * 40), Mode.OFF)
    steps = []  # in which rows were computed once more
    for number in range(3 * (PATIENCE + 1)):
        before = target.feed.counters.reread
        target.step()
        if target.feed.counters.reread > before:
            steps.append(number)
    first, second = steps
    assert first >= PATIENCE
    assert second - first == PATIENCE + 1
    assert target.sequence(2).num_written < CHUNK * 40  # prompts all the time


def test_a_head_inside_and_an_endpoint_are_told_by_one_forward() -> None:
    target = Target(window=64, inside=True)
    assert target.feed.watched == (1, 2, 3)
    target.begin(1)
    target.drafter.draft = lambda rows: None
    inside = target.drafter.lacks[1]
    chunks = target.steps(8)
    ends = [chunk.end for chunk in chunks]
    assert len(ends) == len(set(ends))
    assert chunks[-1].start <= min(inside.start, 36)
    assert target.told(1)[0] == 36
    text = target.drafter._texts[1]
    rows = text.features(text.kept_from - text.base, text.end - text.base)
    begin = text.kept_from
    assert rows[:, 0].tolist() == [2000.0 + p for p in range(begin, text.end)]
    assert begin <= inside.start
    assert not target.drafter.lacks
    assert not target.feed.lacks
    target.core.handle(Cancel(1))
    target.step()
    target.drafter.check_integrity()


@pytest.mark.parametrize("missing", [range(3, 71), range(0, 33), range(5, 6), range(8, 200)])
def test_no_piece_is_longer_than_a_prefill(missing: range) -> None:
    """Each begins with a block, wherever the rows that are missing end."""
    target = Target(window=1024)
    target.submit(1, [3] * 201, Mode.OFF)
    target.steps(8)
    reread = RereadForward(
        target.runner, target.core.scheduler, target.speculator, CHUNK, NoTrace()
    )
    left, starts = missing, []
    while left:
        chunk = reread._chunk(target.sequence(1), left)
        assert chunk is not None
        assert chunk.end == left.stop
        assert chunk.start % BLOCK == 0
        assert 0 < len(chunk.tokens) <= CHUNK
        starts.append(chunk.start)
        left = range(left.start, chunk.start)
        target.core.check_integrity()
    assert starts[-1] == missing.start // BLOCK * BLOCK
