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
    return pool.open(tokens, max_tokens or len(tokens))


def cache(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Run a sequence of these tokens from beginning to end; returns the blocks it had."""
    lease = opened(pool, tokens)
    write_and_commit(lease, tokens)
    blocks = list(lease.blocks)
    for _ in range(2):  # the second time does nothing
        lease.release()
    pool.check_integrity()
    return blocks


def books(pool: BlockPool) -> Any:
    """Everything the pool knows; its containers are flat."""
    return {name: copy.copy(value) for name, value in vars(pool).items()}


# Block boundaries


@pytest.mark.parametrize("same", range(3 * SIZE + 1))
@pytest.mark.parametrize("length", [1, SIZE, SIZE + 1, 3 * SIZE, 4 * SIZE])
def test_a_prefix_is_shared_by_whole_blocks_but_for_the_last_token(same: int, length: int) -> None:
    pool = BlockPool(16, SIZE)
    blocks = cache(pool, list(range(3 * SIZE)))
    text = [*range(same), *range(100, 200)][:length]
    lease = opened(pool, text)
    assert lease.blocks == blocks[: min(same, length - 1) // SIZE]
    assert lease.num_cached_tokens == len(lease.blocks) * SIZE


# Reservations


def test_what_others_reserved_cannot_be_had_even_when_it_is_not_used_yet() -> None:
    pool = BlockPool(5, SIZE)
    first = opened(pool, [1], max_tokens=3 * SIZE)
    before = books(pool)
    assert pool.open([2], 2 * SIZE + 1) is None
    assert books(pool) == before
    second = opened(pool, [2], max_tokens=2 * SIZE)
    second.grow(2 * SIZE)
    first.grow(3 * SIZE)
    assert (pool.num_free, pool.num_reserved, pool.num_used) == (0, 0, 5)
    with pytest.raises(RuntimeError, match="beyond its reservation"):
        first.grow(3 * SIZE + 1)
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


# What is evicted


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
            max_examples=1000 if FULL else 40,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
        ),
    )
    for what in ("refused", "shared", "evicted", "wrong", "entered", "duplicates"):
        assert MET[what] > (200 if FULL else 0), what


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
    ("an idle block is not cached", lambda pool, lease: pool._forget(0)),
    ("an empty block is cached", lambda pool, lease: pool._enter(4, 1, (5,) * SIZE)),
    ("index", lambda pool, lease: pool._index.pop(pool._keys[0])),
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
