"""Every reader gets its own columns of what was watched, from where it asked, and nobody waits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_engine.tensor_plane.features import told_features
from ssd_engine.tensor_plane.host_rows import CopiesOnHost, HostRows
from ssd_engine.tensor_plane.protocol.rows import MakeRows, RowsKey, check_rows
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, Mode, SpeculationRequest
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.work import Work
from ssd_target.speculation.endpoints import feature_feed
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint
from ssd_target.speculation.endpoints.feature_feed import (
    KEEP_BLOCKS,
    KEEP_FLUSHES,
    LAST_FLUSHES,
    REQUESTS_A_ROUND,
    FeatureFeed,
)
from ssd_target.speculation.endpoints.feature_text import FeatureText
from ssd_target.speculation.endpoints.payoff import Payoff
from tests.target.sequences import make_sequence

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
        assert len(rows) <= num_rows
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
        sequence = make_sequence(key, [1] * PROMPT)
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

    def rounds(self, sequence: Sequence, positions: range, *readers: Any) -> None:
        """A forward over each of them, after which readers are told."""
        for position in positions:
            self.tell(sequence, position, position + 1)
            self.feed.flush([*readers])

    def read_prompt(self, sequence: Sequence, *readers: Any) -> None:
        """Its blocks enter the prefix cache."""
        length = len(sequence.prompt)
        self.tell(sequence, 0, length)
        assert sequence.lease is not None
        sequence.lease.grow(length)
        sequence.lease.commit(sequence.committed(), length)
        self.feed.flush([*readers])

    def leave(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        sequence.lease.release()
        sequence.lease = None

    def evict_all(self) -> None:
        """Another sequence takes the whole cache, and leaves it."""
        lease = self.pool.open([], self.pool.num_blocks * BLOCK)
        assert lease is not None
        lease.grow(self.pool.num_blocks * BLOCK)
        lease.release()

    def ask(self, endpoint: DraftEndpoint, sequence: Sequence, begin: int) -> bool:
        endpoint.sequences.add(sequence.id)
        return self.feed.request(endpoint, self.states[sequence.id], begin)


def linked(watched: tuple[int, ...] = (0,), **options: int) -> tuple[Any, Target, Sequence]:
    """One who reads all that is watched, of a sequence from its beginning."""
    endpoint, target = reader(1, watched), Target(watched, **options)
    sequence = target.begin(1)
    target.ask(endpoint, sequence, 0)
    return endpoint, target, sequence


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
    endpoint, target, sequence = linked()
    for begin, end in ((0, 8), (8, 16), (16, 19), (19, 21), (21, 22)):
        target.tell(sequence, begin, end)
        target.feed.flush([endpoint])
    assert [key.round for key, _ in endpoint.features.sent] == [0, 8, 16, 19, 21]
    assert endpoint.features.positions() == [*range(22)]


@pytest.mark.parametrize(("window", "begin"), [(0, 5), (3, 0)])
def test_nothing_is_sent_before_it_is_asked_for_nor_more_than_there_is_use_for(
    window: int, begin: int
) -> None:
    endpoint, target = reader(1, (0,), window), Target((0,))
    sequence = target.begin(1)
    endpoint.sequences.add(1)
    target.tell(sequence, 0, 8)
    target.feed.flush([endpoint])
    assert endpoint.features.sent == []
    target.ask(endpoint, sequence, begin)
    target.feed.flush([endpoint])
    assert endpoint.features.positions() == [5, 6, 7]


def test_a_reader_may_ask_again_a_few_times_a_round() -> None:
    endpoint, target = reader(1, (0,)), Target((0,))
    sequence = target.begin(1)
    target.tell(sequence, 0, 8)
    asked = [target.ask(endpoint, sequence, 0) for _ in range(5)]
    assert asked == [i < REQUESTS_A_ROUND for i in range(5)]
    target.states[1].session.round += 1
    assert target.ask(endpoint, sequence, 0)
    assert target.feed.counters.refused == 5 - REQUESTS_A_ROUND


def test_who_does_not_read_gets_the_newest_run_later_and_nothing_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no room, nothing is looked for."""
    window = 16
    endpoint, target, sequence = linked((0, 1), window=window)
    endpoint.features.room = 0
    with monkeypatch.context() as patch:
        patch.setattr(FeatureText, "pieces", None)
        for position in range(150):
            target.rounds(sequence, range(position, position + 1), endpoint)
            assert target.feed._fed[1].text.num_bytes <= (1.25 * window + 1) * 2 * HIDDEN * 4
            assert not target.feed._noted
    endpoint.features.room = 1 << 30
    target.feed.flush([endpoint])
    told = endpoint.features.positions()
    assert told == [*range(150 - len(told), 150)]
    assert len(told) >= window
    assert target.feed.counters.missed == 150 - len(told)


def test_rows_wider_than_heads_read_have_a_shorter_window() -> None:
    endpoint, target, sequence = linked((0, 1, 2, 3), window=16, window_bytes=128)
    target.rounds(sequence, range(60), endpoint)
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
    target.read_prompt(first, endpoint)
    target.rounds(first, range(PROMPT, PROMPT + 1), endpoint)
    assert len(target.feed.kept) == PROMPT // BLOCK
    second = target.begin(2)
    target.leave(second)
    second.lease = target.pool.open([1] * PROMPT, PROMPT + 4)
    assert second.lease is not None
    cached = second.lease.num_cached_tokens
    assert cached == PROMPT - BLOCK
    target.ask(endpoint, second, 0)
    target.tell(second, cached, PROMPT)
    target.feed.flush([endpoint])
    assert endpoint.features.positions() == [*range(PROMPT)]
    for sequence in (first, second):
        target.leave(sequence)
    target.evict_all()
    assert target.feed.kept.num_bytes == 0


def test_who_reads_what_is_not_watched_yet_waits() -> None:
    """Rows of a forward from before the watch are passed over."""
    endpoint, target = reader(1, (0, 3)), Target((0,))
    sequence = target.begin(1)
    assert target.ask(endpoint, sequence, 0)
    target.tell(sequence, 0, 5)
    target.feed.flush([endpoint])
    target.feed.watch((0, 3), 0.0)
    work = Work(sequence, Chunk([1] * 4, 5, [], 1), sequence.stays)
    target.feed.note([work], torch.zeros(4, HIDDEN), target.states, reading=True)
    target.feed.flush([endpoint])
    assert endpoint.features.sent == []


def test_who_is_told_again_gets_part_of_it_in_each_flush_after_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature_feed, "TELL_BYTES", 8 * 4 * HIDDEN)
    endpoint, target = reader(1, (0,)), Target((0,))
    endpoint.features.stream = replace(endpoint.features.stream, max_rows=8)
    greedy, other = target.begin(1), target.begin(2)
    target.tell(greedy, 0, 64)
    target.tell(other, 0, 3)
    target.ask(endpoint, greedy, 0)
    target.ask(endpoint, other, 0)
    target.feed.flush([endpoint])
    assert endpoint.features.sent[0][0] == RowsKey(2, 0)
    for flush in range(1, 12):
        told = sum(len(rows) for key, rows in endpoint.features.sent if key.sequence == 1)
        assert told <= 8 * flush
        target.feed.flush([endpoint])
    assert told == 64


class Borrowed(CopiesOnHost):
    """All pieces of a forward lie in one copy, as those from a device."""

    def copy(self, pieces: Any, mark: Any) -> list[HostRows]:
        parts = torch.cat([*pieces]).split([len(piece) for piece in pieces])
        return [HostRows(part, borrowed=True) for part in parts]


def test_rows_that_wait_count_as_what_they_hold() -> None:
    """All boundaries that are watched, until they are made; then their own, and no forward's. The
    plane's thread takes nothing yet."""
    endpoint, target = reader(1, (2,)), Target((0, 1, 2, 3))
    target.feed.copies = Borrowed()
    queue: list[tuple[MakeRows, int]] = []

    def take_later(key: RowsKey, make: MakeRows, num_rows: int, **_: bool) -> bool:
        queue.append((make, num_rows))
        return True

    endpoint.features.send_made = take_later
    sequence, others = target.begin(1), target.begin(2)
    target.ask(endpoint, sequence, 0)
    for position in range(3):
        target.tell(others, 0, 50)
        target.tell(sequence, position, position + 1)
        target.feed.flush([endpoint])
        assert queue[-1][1] == 4
    target.feed.flush([endpoint])
    for position, (make, _) in enumerate(queue):
        outgoing = make.__self__  # type: ignore[attr-defined]
        assert outgoing._content.untyped_storage().nbytes() == 4 * HIDDEN
        assert make().tolist() == [[200.0 + position] * HIDDEN]


def test_no_memory_to_copy_rows_costs_these_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Full(CopiesOnHost):
        full = False

        def copy(self, pieces: Any, mark: Any) -> list[HostRows]:
            if self.full:
                raise torch.OutOfMemoryError("no memory")
            return super().copy(pieces, mark)

    endpoint, target, sequence = linked()
    target.feed.copies = copies = Full()
    for position in range(12):
        copies.full = 4 <= position < 7
        target.tell(sequence, position, position + 1)
        target.feed.flush([endpoint])
        target.feed.lacks.clear()  # nobody computes them once more here
        target.feed.flush([endpoint])
    assert endpoint.features.positions() == [*range(4), *range(7, 12)]
    assert target.feed.counters.missed == 3
    assert caplog.text.count("no memory to copy") == 1


def test_blocks_are_kept_a_few_at_a_time_and_none_is_lost() -> None:
    target, length = Target((0,), window=4, keep_bytes=1 << 20), 40 * BLOCK
    sequence = target.begin(1)
    target.leave(sequence)
    sequence.prompt, sequence.lease = [*range(length)], target.pool.open([], length + 40)
    target.read_prompt(sequence)
    for position in range(length, length + 3):
        before = len(target.feed.kept)
        target.rounds(sequence, range(position, position + 1))
        assert len(target.feed.kept) - before == KEEP_BLOCKS + (40 - before) // KEEP_FLUSHES
    target.feed.end(1)
    target.leave(sequence)
    for _ in range(LAST_FLUSHES):
        target.feed.flush([])
    assert len(target.feed.kept) == 40
    assert not target.feed._ended
    target.evict_all()
    assert target.feed.kept.num_bytes == 0


def test_nothing_is_kept_of_blocks_that_were_evicted_meanwhile() -> None:
    target = Target((0,), keep_bytes=1 << 20)
    sequence = target.begin(1)
    target.read_prompt(sequence)
    target.feed.end(1)
    target.leave(sequence)
    target.evict_all()
    for _ in range(LAST_FLUSHES):
        target.feed.flush([])
    assert target.feed.kept.num_bytes == 0
    assert not target.feed._ended


def test_a_sequence_that_comes_back_is_kept_under_the_names_of_its_new_blocks() -> None:
    target, names = Target((0,), keep_bytes=1 << 20), set[int]()
    sequence = target.begin(1)
    for _ in range(2):
        sequence.lease = sequence.lease or target.pool.open([], PROMPT + 40)
        target.read_prompt(sequence)
        target.rounds(sequence, range(PROMPT, PROMPT + 6))
        assert sequence.lease is not None
        assert not names & {*sequence.lease.names}
        names = {*sequence.lease.names}
        assert all(name in target.feed.kept for name in names)
        assert len(target.feed.kept) == len(names) > 0
        target.leave(sequence)
        target.evict_all()
        assert len(target.feed.kept) == 0
        sequence.stays += 1
