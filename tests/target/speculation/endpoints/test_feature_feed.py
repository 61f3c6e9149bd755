"""Every reader gets its own columns of what was watched, from where it asked, and nobody waits."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey, check_rows
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.text.completion import StopRules
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, Mode, SpeculationRequest
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.work import Work
from ssd_target.speculation.endpoints.endpoint import BACK_SECONDS, DraftEndpoint
from ssd_target.speculation.endpoints.feature_feed import (
    MOST_BOUNDARIES,
    REQUESTS_A_ROUND,
    WATCH_SECONDS,
    FeatureFeed,
)
from ssd_target.speculation.endpoints.payoff import Payoff

HIDDEN, BLOCK, PROMPT = 4, 4, 20


class Kept:
    """A sender that keeps what it is handed."""

    came_up, reason, state = True, "", PlaneState.UP

    def __init__(self, needs: FeatureNeeds, room: int = 1 << 30) -> None:
        self.stream, self.room = told_features(needs), room  # rows
        self.sent: list[tuple[RowsKey, Tensor]] = []

    def has_room(self, num_rows: int) -> bool:
        return num_rows <= self.room

    def send_made(
        self, key: RowsKey, make: MakeRows, num_rows: int = 0, complete: bool = False
    ) -> bool:
        rows = make()
        check_rows(self.stream, rows)
        assert len(rows) == num_rows
        self.sent.append((key, rows))
        return True

    def close(self) -> None: ...

    def positions(self) -> list[int]:
        return [key.round + i for key, rows in self.sent for i in range(len(rows))]


def reader(link: int, boundaries: tuple[int, ...], window: int = 0, dtype: str = "float32") -> Any:
    needs = FeatureNeeds(boundaries, HIDDEN, dtype)
    endpoint = DraftEndpoint(link, Payoff(False))
    terms = FeatureTerms(needs, window)
    endpoint.connect(DraftLinkUp(link, 1, False, 8, 2048, 5, features=terms))
    endpoint.features = Kept(needs)
    return endpoint


class Target:
    """Sequences, and what their forwards tell: of position p at boundary b, 100 b + p."""

    def __init__(self, watched: tuple[int, ...], **options: int) -> None:
        self.feed = FeatureFeed(FeatureOptions(HIDDEN, **options))
        self.pool = BlockPool(64, BLOCK)
        self.feed.follow_pool(self.pool)
        self.feed.watch(watched, 0.0)
        self.states: dict[int, Any] = {}

    def begin(self, key: int, mode: Mode = Mode.SSD) -> Sequence:
        rules = StopRules(200)
        sequence = Sequence(key, [1] * PROMPT, [], SamplingParams(0), rules, None, [b""] * 9)
        sequence.lease = self.pool.open([], PROMPT + 40)
        request = SpeculationRequest(mode)
        self.states[key] = SimpleNamespace(
            sequence=sequence, request=request, session=SimpleNamespace(round=0)
        )
        return sequence

    def tell(self, sequence: Sequence, begin: int, end: int) -> None:
        """A forward over these positions; the tokens up to the last one's are committed."""
        while sequence.num_committed < end + 1:
            sequence.output.append(1)
        of_boundary = torch.tensor(self.feed.watched).repeat_interleave(HIDDEN) * 100.0
        rows = torch.arange(begin, end).unsqueeze(1) + of_boundary
        work = Work(sequence, Chunk([1] * (end - begin), begin, [], 1), sequence.stays)
        self.feed.note([work], rows, self.states, reading=True)

    def ask(self, endpoint: DraftEndpoint, sequence: Sequence, begin: int) -> bool:
        endpoint.sequences.add(sequence.id)
        return self.feed.request(endpoint, self.states[sequence.id], begin)


def test_readers_get_their_own_boundaries_in_their_order() -> None:
    first, second = reader(1, (1, 3)), reader(2, (3, 2), dtype="bfloat16")
    target = Target((1, 2, 3))
    one, other = target.begin(1), target.begin(2)
    assert target.feed.wanted([first, second], 0.0) == (1, 2, 3)
    assert target.ask(first, one, 0)
    assert target.ask(second, other, 0)
    for sequence in (one, other):
        target.tell(sequence, 0, 5)
    target.feed.flush([first, second])
    [(key, rows)] = first.features.sent
    assert key == RowsKey(1, 0)
    assert rows[:, ::HIDDEN].tolist() == [[100 + p, 300 + p] for p in range(5)]
    [(key, rows)] = second.features.sent
    assert key == RowsKey(2, 0)
    assert rows.dtype is torch.bfloat16
    expected = torch.tensor([[300.0 + p, 200.0 + p] for p in range(5)])
    assert torch.equal(rows[:, ::HIDDEN], expected.bfloat16())


def test_rows_of_each_outcome_follow_the_prompts() -> None:
    endpoint, target = reader(1, (0,)), Target((0,))
    sequence = target.begin(1)
    target.ask(endpoint, sequence, 0)
    for begin, end in ((0, 8), (8, 16), (16, 19), (19, 21), (21, 22)):
        target.tell(sequence, begin, end)
        target.feed.flush([endpoint])
    assert [key.round for key, _ in endpoint.features.sent] == [0, 8, 16, 19, 21]
    assert endpoint.features.positions() == [*range(22)]


def test_nothing_is_sent_before_it_is_asked_for() -> None:
    endpoint, target = reader(1, (0,)), Target((0,))
    sequence = target.begin(1)
    endpoint.sequences.add(1)
    target.tell(sequence, 0, 8)
    target.feed.flush([endpoint])
    assert endpoint.features.sent == []
    target.ask(endpoint, sequence, 5)
    target.feed.flush([endpoint])
    assert endpoint.features.positions() == [5, 6, 7]
    assert target.feed.counters.missed == 0


def test_a_reader_may_ask_again_a_few_times_a_round() -> None:
    endpoint, target = reader(1, (0,)), Target((0,))
    sequence = target.begin(1)
    target.tell(sequence, 0, 8)
    asked = [target.ask(endpoint, sequence, 0) for _ in range(5)]
    assert asked == [i < REQUESTS_A_ROUND for i in range(5)]
    target.states[1].session.round += 1
    assert target.ask(endpoint, sequence, 0)
    assert target.feed.counters.refused == 5 - REQUESTS_A_ROUND


def test_a_small_window_is_told_no_more_than_it_has_use_for() -> None:
    endpoint, target = reader(1, (0,), window=3), Target((0,))
    sequence = target.begin(1)
    target.tell(sequence, 0, 8)
    target.feed.flush([endpoint])
    target.ask(endpoint, sequence, 0)
    target.feed.flush([endpoint])
    assert endpoint.features.positions() == [5, 6, 7]


def test_who_does_not_read_gets_the_newest_run_later_and_nothing_grows() -> None:
    window = 16
    endpoint, target = reader(1, (0, 1)), Target((0, 1), window=window)
    sequence = target.begin(1)
    endpoint.features.room = 0
    target.ask(endpoint, sequence, 0)
    for position in range(150):
        target.tell(sequence, position, position + 1)
        target.feed.flush([endpoint])
        text = target.feed._fed[1].text
        assert text.num_bytes <= 1.25 * window * 2 * HIDDEN * 4
        assert not target.feed._noted
    endpoint.features.room = 1 << 30
    target.feed.flush([endpoint])
    told = endpoint.features.positions()
    assert told == [*range(150 - len(told), 150)]
    assert len(told) >= window
    assert target.feed.counters.missed == 150 - len(told)


def test_rows_wider_than_heads_read_have_a_shorter_window() -> None:
    endpoint, target = reader(1, (0, 1, 2, 3)), Target((0, 1, 2, 3), window=16, window_bytes=128)
    sequence = target.begin(1)
    for position in range(60):
        target.tell(sequence, position, position + 1)
        target.feed.flush([endpoint])
    assert target.feed._fed[1].text.num_bytes <= 128 + 4 * HIDDEN * 4  # and the last row


def test_features_of_other_requests_are_not_kept() -> None:
    target = Target((0,))
    for key, mode in enumerate((Mode.OFF, Mode.SYNC)):
        target.tell(target.begin(key, mode), 0, 8)
    target.feed.flush([])
    assert not target.feed._fed


def test_kept_blocks_are_told_after_a_prefix_hit_until_they_are_evicted() -> None:
    endpoint, target = reader(1, (0,)), Target((0,), window=4, keep_bytes=1 << 16)
    first = target.begin(1)
    target.tell(first, 0, PROMPT)
    assert first.lease is not None
    first.lease.grow(PROMPT)
    first.lease.commit(first.committed(), PROMPT)
    target.feed.flush([endpoint])
    target.tell(first, PROMPT, PROMPT + 1)
    target.feed.flush([endpoint])
    assert len(target.feed.kept) == PROMPT // BLOCK
    second = target.begin(2)
    second.lease = target.pool.open([1] * PROMPT, PROMPT + 4)
    assert second.lease is not None
    cached = second.lease.num_cached_tokens
    assert cached == PROMPT - BLOCK
    target.ask(endpoint, second, 0)
    target.tell(second, cached, PROMPT)
    target.feed.flush([endpoint])
    assert endpoint.features.positions() == [*range(PROMPT)]
    for name in first.lease.names:
        target.pool.on_forgotten(name)
    assert target.feed.kept.num_bytes == 0


def test_what_is_watched_follows_who_reads() -> None:
    feed = FeatureFeed(FeatureOptions(HIDDEN), inside=(2,))
    assert feed.wanted([], 0.0) == (2,)
    one, other = reader(1, (1, 3)), reader(2, (3,))
    model = DraftEndpoint(3, Payoff(False))
    model.connect(DraftLinkUp(3, 1, False, 8, 2048, 5))
    assert feed.wanted([model], 0.0) == (2,)
    feed.watch(feed.wanted([one, model], 0.0), 0.0)
    assert feed.watched == (1, 2, 3)
    assert feed.wanted([other], 0.0) == (1, 2, 3)  # not narrowed while somebody reads
    other.disconnect(now=100.0)
    assert feed.wanted([other], 100.0 + BACK_SECONDS - 1) == (1, 2, 3)  # it may come back
    assert feed.wanted([other], 100.0 + BACK_SECONDS) == (2,)
    features = torch.arange(3 * HIDDEN).unsqueeze(0)
    assert feed.read_inside(features).tolist() == [[*range(HIDDEN, 2 * HIDDEN)]]


def test_endpoints_that_ask_for_ever_other_boundaries_are_not_followed_often() -> None:
    """A device captures its steps anew for each change."""
    feed, changes, watched = FeatureFeed(FeatureOptions(HIDDEN)), 0, ()
    for second in range(600):
        wanted = feed.wanted([reader(1, (second % 30,))], float(second))
        if wanted != watched:
            feed.watch(wanted, float(second))
            changes, watched = changes + 1, wanted
    assert 1 < changes <= 1 + 600 / WATCH_SECONDS


def test_no_more_boundaries_are_watched_than_there_is_room_for() -> None:
    honest, greedy = reader(1, (1, 2, 3)), reader(2, tuple(range(MOST_BOUNDARIES + 1)))
    for endpoints in ([honest, greedy], [greedy, honest]):
        feed = FeatureFeed(FeatureOptions(HIDDEN))
        assert feed.wanted(endpoints, 0.0) == (1, 2, 3)


def test_who_reads_what_is_not_watched_yet_waits() -> None:
    target, other = Target((0,)), reader(1, (0, 3))
    sequence = target.begin(1)
    assert target.ask(other, sequence, 0)
    target.tell(sequence, 0, 5)
    target.feed.flush([other])
    assert other.features.sent == []


def test_rows_of_a_forward_from_before_the_watch_are_passed_over() -> None:
    endpoint, target = reader(1, (0, 1)), Target((0,))
    sequence = target.begin(1)
    target.ask(endpoint, sequence, 0)
    work = Work(sequence, Chunk([1] * 4, 0, [], 1), sequence.stays)
    target.feed.watch((0, 1), 0.0)
    target.feed.note([work], torch.zeros(4, HIDDEN), target.states, reading=True)
    target.feed.flush([endpoint])
    assert endpoint.features.sent == []
