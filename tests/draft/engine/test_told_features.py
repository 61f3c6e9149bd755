"""What a target tells reaches the speculator in place and in order, and nothing else does."""

from typing import Any

import torch
from torch import Tensor

from ssd_draft.engine.told_features import WAITING_SECONDS, ToldFeatures
from ssd_draft.engine.waiting_rows import MOST_SENDS
from ssd_draft.planning.plan import Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.speculation.features import FeatureNeeds
from ssd_engine.speculation.frames import (
    FeatureRequest,
    Launch,
    Notice,
    NoticeKind,
    Open,
    Outcome,
    Plane,
    Source,
)
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from tests.draft.inbox import Inbox
from tests.draft.told_draft import ToldDraft, opened
from tests.speculation.toy_world import ToySpeculator

WIDTH = 4
NEEDS = FeatureNeeds((0, 1), WIDTH // 2, "float32")
PROMPT = 10


def opening(sequence: int = 1, output: int = 0, round_: int = 0) -> Open:
    return opened(sequence, [4] * PROMPT, [8] * output, round=round_, max_tokens=40, depth=3)


def row(position: int) -> Tensor:
    return torch.full((WIDTH,), float(position))


def come(inbox: Inbox, begin: int, end: int, sequence: int = 1) -> None:
    rows = torch.stack([row(position) for position in range(begin, end)])
    inbox.rows.append((RowsKey(sequence, begin), rows))


class Reader(ToySpeculator):
    """Notes what it is told."""

    features = NEEDS

    def __init__(self, known: int = 0) -> None:
        super().__init__()
        self.known = known
        self.told: list[tuple[int, int, int]] = []  # sequence, begin and end

    def features_from(self, sequence: DraftSequence) -> int:
        return self.known

    def take_features(self, sequence: DraftSequence, start: int, rows: Tensor) -> None:
        assert all(torch.equal(each, row(start + i)) for i, each in enumerate(rows))
        self.told.append((sequence.id, start, start + len(rows)))


class SlowReader(Reader):
    """Has read what a test says, and has a place for a window beyond it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.read, self.window = 0, window

    def features_until(self, sequence: DraftSequence, start: int) -> int:
        return self.read + self.window


class Bench(ToldDraft):
    def __init__(
        self, reader: Reader | ToySpeculator | None = None, has_plane: bool = True
    ) -> None:
        self.inbox, self.now = Inbox(), 0.0
        self.reader: Any = reader or Reader()
        plane = Plane(0, 0, PlaneAnswer(PlaneKind.TCP, "", b"", told_features(NEEDS)))
        super().__init__(
            self.reader,
            lambda depth: Planner(3, 4, (1, 1), (1, 1)),
            clock=lambda: self.now,
            open_features=lambda up, needs: (self.inbox, plane) if has_plane else None,
        )

    def come(self, begin: int, end: int, sequence: int = 1) -> None:
        come(self.inbox, begin, end, sequence)

    def hear(self, *frames: Any) -> list[Any]:
        """What the draft says after a step."""
        if frames:
            self.send(*frames)
        return self.step()

    def requests(self, *frames: Any) -> list[tuple[int, int]]:
        said = self.hear(*frames)
        return [(f.sequence, f.from_position) for f in said if isinstance(f, FeatureRequest)]


def test_an_open_is_followed_by_a_request_for_what_is_not_known() -> None:
    for known in (0, 7, PROMPT - 1):
        bench = Bench(reader=Reader(known))
        assert bench.requests(opening()) == [(1, known)]
        assert bench.requests() == []


def test_rows_may_come_before_their_open_and_before_their_outcome() -> None:
    bench = Bench()
    bench.come(0, 9)
    bench.come(9, 10)  # what the outcome of round 0 commits
    bench.hear()
    assert bench.reader.told == []
    bench.hear(opening())
    assert bench.reader.told == [(1, 0, 9)]
    bench.hear(Outcome(1, 0, 0, 5))
    assert bench.reader.told == [(1, 0, 9), (1, 9, 10)]
    assert bench.core.stats().dropped_features == 0


def test_few_rows_wait() -> None:
    inbox, reader = Inbox(), Reader()
    features = ToldFeatures(inbox, reader, lambda: 0.0, max_waiting_bytes=6 * WIDTH * 4)
    for sequence in range(10):
        come(inbox, 0, 2, sequence)
        features.tell({})
        assert features._waiting.num_bytes <= 6 * WIDTH * 4
    assert [features._waiting.first(each) for each in (6, 7, 8, 9)] == [None, 0, 0, 0]
    assert features.take_counts().dropped == 14


def test_rows_that_wait_hold_no_more_memory_than_is_counted() -> None:
    """Of a large send the last row alone waits for its outcome: the rest is gone."""
    bench = Bench()
    bench.hear(opening())
    bench.come(0, PROMPT)
    bench.hear()
    assert bench.reader.told == [(1, 0, PROMPT - 1)]
    features = bench.core._links[1].features
    assert features is not None
    [send] = features._waiting._sends.values()
    assert send.rows.untyped_storage().nbytes() == features._waiting.num_bytes == WIDTH * 4


def test_rows_that_wait_in_vain_are_dropped_though_nothing_comes() -> None:
    """An engine that has nothing else to do looks after them."""
    bench = Bench()
    bench.come(0, 9, sequence=77)
    bench.hear()
    assert not bench.core.has_work
    bench.now += WAITING_SECONDS + 0.1
    assert bench.core.has_work
    bench.hear()
    assert bench.core.stats().dropped_features == 9
    assert not bench.core.has_work


def test_what_open_sequences_cannot_read_yet_stays_in_the_inbox() -> None:
    inbox, reader = Inbox(), SlowReader(window=1)
    now = 0.0
    features = ToldFeatures(inbox, reader, lambda: now, max_waiting_bytes=12 * WIDTH * 4)
    sequence = DraftSequence(1, opening(), 0.0, 3)
    features.opened(sequence)
    for position in range(9):
        come(inbox, position, position + 1)
    features.tell({1: sequence}, 8 * WIDTH * 4)
    features.tell({1: sequence}, 8 * WIDTH * 4)
    assert len(inbox) == 1
    assert not features.has_news({1: sequence})
    for read in range(1, 9):
        now, reader.read = now + WAITING_SECONDS - 0.1, read
        assert features.has_news({1: sequence})
        features.tell({1: sequence})
    assert reader.told == [(1, read, read + 1) for read in range(9)]


def test_no_more_sends_wait_than_a_step_looks_through() -> None:
    bench = Bench()
    bench.hear(opening())
    for i in range(MOST_SENDS + 10):
        bench.come(20 + i % 10, 21 + i % 10)
    bench.hear()
    features = bench.core._links[1].features
    assert features is not None
    assert len(features._waiting) == MOST_SENDS
    assert bench.core.stats().dropped_features == 10


def test_what_is_missing_is_asked_for_once() -> None:
    bench = Bench()
    bench.hear(opening(1, output=20, round_=5))
    bench.come(0, 8)
    bench.come(12, 14)  # 8 to 12 were lost
    bench.come(14, 16)
    assert bench.requests() == [(1, 8)]
    assert bench.reader.told == [(1, 0, 8)]
    bench.come(8, 12)
    bench.come(12, 16)
    assert bench.requests() == []
    assert bench.reader.told[1:] == [(1, 8, 12), (1, 12, 16)]


def test_where_the_target_has_nothing_more_a_gap_is_passed_on() -> None:
    bench = Bench()
    bench.hear(opening(1, output=20, round_=5))
    bench.come(3, 8)  # its answer to the first request begins there
    assert bench.requests() == []
    bench.come(12, 14)
    assert bench.requests() == [(1, 8)]
    bench.come(12, 16)  # the answer to that
    assert bench.requests() == []
    assert bench.reader.told == [(1, 3, 8), (1, 12, 16)]


def test_rounds_whose_rows_are_late_are_counted() -> None:
    bench = Bench()
    bench.hear(opening())
    bench.come(0, 9)
    bench.hear(Outcome(1, 0, 0, 5), Launch(1, 1, [], Source.NONE, 3, 0))
    bench.come(9, 10)
    bench.hear(Outcome(1, 1, 0, 5), Launch(1, 2, [], Source.NONE, 3, 0))
    bench.hear(Outcome(1, 2, 0, 5))  # row 10 has not come
    stats = bench.core.stats()
    assert (stats.feature_rounds, stats.late_feature_rounds) == (2, 1)


def refusals(said: list[Any]) -> list[str]:
    return [
        each.reason for each in said if isinstance(each, Notice) and each.kind is NoticeKind.REFUSED
    ]


def test_without_a_plane_sequences_are_refused_with_the_reason() -> None:
    bench = Bench(has_plane=False)
    assert refusals(bench.hear(opening())) == ["no tensor plane joins this head and its target"]
    assert not bench.core.stats().sequences
    bench = Bench()
    bench.inbox.state, bench.inbox.came_up = PlaneState.BROKEN, False
    bench.inbox.reason = "the peer cannot be reached"
    [reason] = refusals(bench.hear(opening()))
    assert "did not come up: the peer cannot be reached" in reason
    bench = Bench()
    bench.inbox.state, bench.inbox.came_up = PlaneState.CONNECTING, False
    assert refusals(bench.hear(opening())) == []
    bench.inbox.state = PlaneState.BROKEN  # what was opened before is given up
    assert len(refusals(bench.hear())) == 1
    assert not bench.core.stats().sequences


def test_a_speculator_that_reads_nothing_opens_no_plane() -> None:
    bench = Bench(reader=ToySpeculator())
    assert bench.requests(opening()) == []
    assert not any(isinstance(each, Plane) for each in bench.hear())
