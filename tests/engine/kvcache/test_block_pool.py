"""The block pool: nobody ever reads another's tokens, and nothing is lost or promised twice."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ssd_engine.kvcache.block_pool import ROOT, BlockLease, BlockPool
from tests.suite.scale import FULL

SIZE = 4
SAME_HASH = (0, 2**61 - 1)  # hash(0) == hash(2**61 - 1) in CPython


def write_and_commit(lease: BlockLease, tokens: list[int]) -> None:
    lease.grow(len(tokens))
    lease.commit(tokens, len(tokens))


def opened(pool: BlockPool, tokens: list[int], max_tokens: int | None = None) -> BlockLease:
    lease = pool.open(tokens, max_tokens or len(tokens))
    assert lease is not None
    return lease


def cache(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Run a sequence of these tokens from beginning to end; returns the blocks it had."""
    lease = opened(pool, tokens)
    write_and_commit(lease, tokens)
    blocks = list(lease.blocks)
    lease.release()
    pool.check_integrity()
    return blocks


def books(pool: BlockPool) -> Any:
    """Everything the pool knows; its containers are flat."""
    return {name: copy.copy(value) for name, value in vars(pool).items()}


# Block boundaries


@pytest.mark.parametrize("num_tokens", range(1, 3 * SIZE + 2))
def test_only_whole_blocks_are_cached(num_tokens: int) -> None:
    pool = BlockPool(8, SIZE)
    cache(pool, list(range(num_tokens)))
    assert pool.num_cached == num_tokens // SIZE
    longer = opened(pool, list(range(100, 100 + SIZE)))
    assert longer.num_cached_tokens == 0
    longer.release()
    again = opened(pool, [*range(num_tokens), 99])
    assert again.num_cached_tokens == num_tokens // SIZE * SIZE


@pytest.mark.parametrize("num_tokens", range(1, 3 * SIZE + 2))
def test_the_last_token_is_never_taken_from_the_cache(num_tokens: int) -> None:
    pool = BlockPool(16, SIZE)
    cache(pool, list(range(4 * SIZE)))
    lease = opened(pool, list(range(num_tokens)))
    assert lease.num_cached_tokens == (num_tokens - 1) // SIZE * SIZE < num_tokens


@pytest.mark.parametrize("different", range(3 * SIZE))
def test_a_prefix_is_shared_up_to_the_block_of_the_first_difference(different: int) -> None:
    pool = BlockPool(16, SIZE)
    tokens = list(range(3 * SIZE))
    blocks = cache(pool, tokens)
    tokens[different] = 77
    lease = opened(pool, [*tokens, 5])
    assert lease.blocks == blocks[: different // SIZE]


def test_equal_tokens_after_different_beginnings_are_not_shared() -> None:
    pool = BlockPool(16, SIZE)
    cache(pool, [1] * SIZE + [7] * SIZE)
    lease = opened(pool, [2] * SIZE + [7] * SIZE + [0])
    assert lease.num_cached_tokens == 0
    write_and_commit(lease, [2] * SIZE + [7] * SIZE)
    assert pool.num_cached == 4


def test_a_block_that_is_not_committed_is_not_shared() -> None:
    pool = BlockPool(16, SIZE)
    first = opened(pool, list(range(9)))
    first.grow(9)
    assert opened(pool, list(range(9))).num_cached_tokens == 0
    first.commit(list(range(9)), 2 * SIZE - 1)  # the second block lacks one
    assert opened(pool, list(range(9))).num_cached_tokens == SIZE
    first.commit(list(range(9)), 2 * SIZE)
    assert opened(pool, list(range(9))).num_cached_tokens == 2 * SIZE
    pool.check_integrity()


# Hash collisions


def test_tokens_of_equal_hash_are_told_apart() -> None:
    zero, other = SAME_HASH
    assert hash((zero,) * SIZE) == hash((other,) * SIZE)
    pool = BlockPool(8, SIZE)
    cache(pool, [zero] * SIZE)
    assert opened(pool, [other] * SIZE + [1]).num_cached_tokens == 0
    assert opened(pool, [zero] * SIZE + [1]).num_cached_tokens == SIZE


def test_prefixes_of_equal_hash_lead_to_their_own_continuations() -> None:
    pool = BlockPool(16, SIZE)
    blocks = {first: cache(pool, [first] * SIZE + [3] * SIZE) for first in SAME_HASH}
    for first in SAME_HASH:
        assert opened(pool, [first] * SIZE + [3] * SIZE + [1]).blocks == blocks[first]


# Reservations


def test_a_reservation_exactly_at_capacity_fits_and_can_be_filled() -> None:
    pool = BlockPool(5, SIZE)
    lease = opened(pool, [1, 2, 3], max_tokens=5 * SIZE)
    pool.check_integrity()
    lease.grow(5 * SIZE)
    assert (pool.num_free, pool.num_reserved, pool.num_used) == (0, 0, 5)
    pool.check_integrity()


def test_one_token_over_capacity_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(5, SIZE)
    before = books(pool)
    assert pool.open([1, 2, 3], 5 * SIZE + 1) is None
    assert books(pool) == before


def test_what_others_reserved_cannot_be_had_even_when_it_is_not_used_yet() -> None:
    pool = BlockPool(5, SIZE)
    first = opened(pool, [1], max_tokens=3 * SIZE)
    before = books(pool)
    assert pool.open([2], 2 * SIZE + 1) is None
    assert books(pool) == before
    second = opened(pool, [2], max_tokens=2 * SIZE)
    second.grow(2 * SIZE)
    first.grow(3 * SIZE)
    pool.check_integrity()


def test_shared_blocks_in_use_cost_a_new_sequence_nothing() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(2 * SIZE))
    first = opened(pool, tokens, max_tokens=3 * SIZE)
    write_and_commit(first, tokens)
    second = opened(pool, [*tokens, 9], max_tokens=3 * SIZE)  # 2 shared, 1 of its own
    assert second.blocks == first.blocks
    assert pool.open([5], 1) is None
    pool.check_integrity()


def test_shared_blocks_that_are_idle_count_against_the_room() -> None:
    """Two idle blocks would be revived: what is left besides them is too little."""
    pool = BlockPool(4, SIZE)
    tokens = list(range(2 * SIZE))
    cache(pool, tokens)
    before = books(pool)
    assert pool.open([*tokens, 9], 4 * SIZE + 1) is None
    assert books(pool) == before
    lease = opened(pool, [*tokens, 9], max_tokens=4 * SIZE)
    lease.grow(4 * SIZE)
    assert lease.num_cached_tokens == 2 * SIZE
    assert len(set(lease.blocks)) == 4
    pool.check_integrity()


def test_growth_beyond_the_reservation_is_an_error() -> None:
    pool = BlockPool(5, SIZE)
    lease = opened(pool, [1], max_tokens=2 * SIZE)
    lease.grow(2 * SIZE)
    with pytest.raises(RuntimeError, match="beyond its reservation"):
        lease.grow(2 * SIZE + 1)
    pool.check_integrity()


def test_growing_to_what_is_held_already_changes_nothing() -> None:
    pool = BlockPool(5, SIZE)
    lease = opened(pool, [1], max_tokens=3 * SIZE)
    lease.grow(SIZE + 1)
    before = books(pool)
    lease.grow(2 * SIZE)
    lease.grow(1)
    assert books(pool) == before


def test_release_gives_back_blocks_and_reservation_once() -> None:
    pool = BlockPool(5, SIZE)
    lease = opened(pool, [1], max_tokens=5 * SIZE)
    lease.grow(2 * SIZE)
    lease.release()
    assert (pool.num_free, pool.num_reserved, pool.num_leases) == (5, 0, 0)
    other = opened(pool, [2], max_tokens=5 * SIZE)
    other.grow(5 * SIZE)
    lease.release()
    pool.check_integrity()
    assert (pool.num_free, pool.num_leases) == (0, 1)


def test_what_follows_a_shared_prefix_is_cached_as_its_continuation() -> None:
    pool = BlockPool(16, SIZE)
    cache(pool, [1] * SIZE)
    longer = [1] * SIZE + [2] * SIZE
    lease = opened(pool, [*longer, 0])
    assert lease.num_cached_tokens == SIZE
    write_and_commit(lease, longer)
    pool.check_integrity()
    assert pool.num_cached == 2
    assert opened(pool, [*longer, 0]).blocks == lease.blocks[:2]
    assert opened(pool, [2] * SIZE + [0]).blocks == []  # the same tokens, another place


# What is evicted


def test_a_cached_prefix_survives_until_its_place_is_needed() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(2 * SIZE))
    cache(pool, tokens)
    cache(pool, [50] * 2)  # there is an empty block for it
    assert pool.num_cached == 2
    assert opened(pool, [*tokens, 1]).num_cached_tokens == 2 * SIZE


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    tokens = list(range(3 * SIZE))
    for needed in range(4):
        pool = BlockPool(3, SIZE)
        cache(pool, tokens)
        if needed:
            other = opened(pool, [99], max_tokens=needed * SIZE)
            other.grow(needed * SIZE)
            other.release()
        pool.check_integrity()
        assert len(pool._match(tokens)) == 3 - needed


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4, SIZE)
    old, new = [1] * SIZE, [2] * SIZE
    cache(pool, old)
    cache(pool, new)
    opened(pool, [*old, 0]).release()  # used again: now the younger of the two
    filler = opened(pool, [9], max_tokens=3 * SIZE)
    filler.grow(3 * SIZE)
    assert opened(pool, [*old]).blocks == []
    assert pool._match(old) != []
    assert pool._match(new) == []
    pool.check_integrity()


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(2 * SIZE))
    holder = opened(pool, tokens)
    write_and_commit(holder, tokens)
    filler = opened(pool, [9], max_tokens=2 * SIZE)
    filler.grow(2 * SIZE)
    assert not set(filler.blocks) & set(holder.blocks)
    assert pool.open([9], 1) is None
    assert pool._match(tokens) == holder.blocks


def test_the_same_content_computed_twice_is_cached_once() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(2 * SIZE))
    first, second = opened(pool, tokens), opened(pool, tokens)
    write_and_commit(first, tokens)
    write_and_commit(second, tokens)
    assert pool.num_cached == 2
    second.release()
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached) == (6, 2)
    first.release()
    assert (pool.num_free, pool.num_cached) == (8, 2)
    assert opened(pool, [*tokens, 1]).num_cached_tokens == 2 * SIZE


def test_a_continuation_of_content_computed_twice_is_found() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(3 * SIZE))
    first, second = opened(pool, tokens), opened(pool, tokens)
    write_and_commit(first, tokens[: 2 * SIZE])
    write_and_commit(second, tokens)  # its third block follows blocks that are not its own
    lease = opened(pool, [*tokens, 1])
    assert lease.blocks == first.blocks + second.blocks[2:]
    pool.check_integrity()


# Random schedules


@dataclass
class Holder:
    """A lease and what its sequence believes."""

    lease: BlockLease
    tokens: list[int]
    max_tokens: int
    written: int


MET: Counter[str] = Counter()


ZERO, TWIN = SAME_HASH
TEXTS = ([ZERO] * 20, [ZERO] * 4 + [1] * 16, [TWIN] * 4 + [1] * 16, [ZERO, TWIN] * 10)


class Schedules(RuleBasedStateMachine):
    """A few similar texts in a small pool; memory holds what was really written."""

    BLOCKS, SIZE, MOST_HOLDERS = 12, 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BLOCKS, self.SIZE)
        # What a place holds depends on all tokens up to it, as KV does.
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.holders: list[Holder] = []

    @precondition(lambda self: len(self.holders) < self.MOST_HOLDERS)
    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, 13), more=st.integers(0, 6))
    def open(self, text: list[int], length: int, more: int) -> None:
        tokens = text[:length]
        before = books(self.pool)
        lease = self.pool.open(tokens, length + more)
        if lease is None:
            MET["refused"] += 1
            assert books(self.pool) == before
            return
        MET["shared"] += len(lease.blocks)
        assert lease.num_cached_tokens == len(lease.blocks) * self.SIZE < length
        holder = Holder(lease, tokens, length + more, written=lease.num_cached_tokens)
        self.holders.append(holder)
        self.check_content(holder)

    @precondition(lambda self: self.holders)
    @rule(
        which=st.integers(0, MOST_HOLDERS - 1),
        count=st.integers(1, 13),
        wrong=st.integers(0, 3),
        token=st.sampled_from([ZERO, TWIN, 1]),
        commit=st.booleans(),
    )
    def write(self, which: int, count: int, wrong: int, token: int, commit: bool) -> None:
        """A forward: ``count`` tokens that are committed, then guesses that were wrong."""
        holder = self.holders[which % len(self.holders)]
        end = min(holder.written + count, holder.max_tokens)
        while len(holder.tokens) < end:
            holder.tokens.append(token)
        guesses = [2] * min(wrong, holder.max_tokens - end)
        cached = self.pool.num_cached
        holder.lease.grow(end + len(guesses))
        MET["evicted"] += cached - self.pool.num_cached
        written = holder.tokens[:end] + guesses
        for position in range(holder.written, len(written)):
            block = holder.lease.blocks[position // self.SIZE]
            assert not any(block in h.lease.blocks for h in self.holders if h is not holder)
            self.memory[block, position % self.SIZE] = tuple(written[: position + 1])
        MET["wrong"] += len(guesses)
        holder.written = end
        if commit:
            self.commit(which)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, MOST_HOLDERS - 1))
    def commit(self, which: int) -> None:
        holder = self.holders[which % len(self.holders)]
        cached = self.pool.num_cached
        full = holder.written // self.SIZE - holder.lease._num_entered
        holder.lease.commit(holder.tokens, holder.written)
        MET["entered"] += self.pool.num_cached - cached
        MET["duplicates"] += full - (self.pool.num_cached - cached)
        assert not holder.lease.can_enter(holder.written)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, MOST_HOLDERS - 1))
    def release(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        holder.lease.release()
        assert holder.lease.blocks == []

    def check_content(self, holder: Holder) -> None:
        for position in range(holder.written):
            place = holder.lease.blocks[position // self.SIZE], position % self.SIZE
            assert self.memory[place] == tuple(holder.tokens[: position + 1])

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_leases == len(self.holders)

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for holder in self.holders:
            self.check_content(holder)

    def teardown(self) -> None:
        """Every reservation can still be filled, whatever happened; then all is free again."""
        for holder in self.holders:
            holder.lease.grow(holder.max_tokens)
        self.pool.check_integrity()
        for holder in self.holders:
            holder.lease.release()
        self.pool.check_integrity()
        assert (self.pool.num_free, self.pool.num_reserved) == (self.BLOCKS, 0)


@pytest.mark.timeout(600)
def test_random_schedules_keep_the_books_and_never_serve_foreign_tokens() -> None:
    MET.clear()
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=1000 if FULL else 200,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
        ),
    )
    print(dict(MET))
    for what in ("refused", "shared", "evicted", "wrong", "entered", "duplicates"):
        assert MET[what] > (200 if FULL else 5), what


# The check itself


def corruptible() -> tuple[BlockPool, BlockLease]:
    """Blocks 0-1 idle and cached, 2-3 held (2 cached), 4-5 empty, one more reserved."""
    pool = BlockPool(6, SIZE)
    cache(pool, [1] * 2 * SIZE)
    lease = opened(pool, [2] * SIZE, max_tokens=3 * SIZE)
    lease.grow(2 * SIZE)
    lease.commit([2] * SIZE, SIZE)
    pool.check_integrity()
    return pool, lease


def over_reserve(pool: BlockPool, lease: BlockLease) -> None:
    lease.reserved += 4
    pool.num_reserved += 4


def drop_from_index(pool: BlockPool, lease: BlockLease) -> None:
    del pool._index[pool._keys[0]]


def cache_an_empty_block(pool: BlockPool, lease: BlockLease) -> None:
    pool._enter(4, 1, (5,) * SIZE)


def forget_an_idle_block(pool: BlockPool, lease: BlockLease) -> None:
    pool._forget(0)


CORRUPTIONS: list[tuple[str, Callable[[BlockPool, BlockLease], Any]]] = [
    ("holders", lambda pool, lease: pool._holders.__setitem__(2, 2)),
    ("holders", lambda pool, lease: lease.blocks.append(4)),
    ("holders", lambda pool, lease: pool._leases.clear()),
    ("both held and free", lambda pool, lease: pool._empty.append(3)),
    ("both held and free", lambda pool, lease: pool._idle.__setitem__(2, None)),
    ("empty and idle", lambda pool, lease: pool._empty.append(0)),
    ("empty and idle", lambda pool, lease: pool._empty.append(4)),
    ("a block is lost", lambda pool, lease: pool._empty.pop()),
    ("a block is lost", lambda pool, lease: pool._idle.popitem()),
    ("an idle block is not cached", forget_an_idle_block),
    ("an empty block is cached", cache_an_empty_block),
    ("index", drop_from_index),
    ("index", lambda pool, lease: pool._index.__setitem__((9, (9,) * SIZE), 2)),
    ("names", lambda pool, lease: pool._names.__setitem__(0, pool._names[1])),
    ("names", lambda pool, lease: pool._names.pop(0)),
    ("reservations", lambda pool, lease: setattr(pool, "num_reserved", 0)),
    ("reservations", lambda pool, lease: setattr(lease, "reserved", 2)),
    ("over-reserved", over_reserve),
]


@pytest.mark.parametrize(("problem", "corrupt"), CORRUPTIONS)
def test_corrupted_books_do_not_pass_the_check(
    problem: str, corrupt: Callable[[BlockPool, BlockLease], Any]
) -> None:
    pool, lease = corruptible()
    corrupt(pool, lease)
    with pytest.raises(RuntimeError, match=f"block pool integrity: .*{problem}"):
        pool.check_integrity()


def test_roots_after_a_token_are_those_of_no_other_text() -> None:
    pool = BlockPool(8, 4)
    roots = [pool.new_root() for _ in range(20)]
    tokens = (0, 1, 2**31, 2**32 - 1)
    after = {pool.root_after(root, token) for root in (ROOT, *roots) for token in tokens}
    assert len(after) == 21 * len(tokens)
    assert max(after) < ROOT
