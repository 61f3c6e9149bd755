"""Places in the host's memory for the KV of sequences that were set aside."""

import pytest

from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.kvcache.swap import Swap
from ssd_target.scheduling.kept_kv import KeptKV, KeptOptions
from ssd_target.scheduling.sequence import Sequence
from tests.target.sequences import make_sequence

BLOCK = 4


def running(pool: BlockPool, number: int, blocks: int) -> Sequence:
    sequence = make_sequence(number, [number] * (BLOCK * blocks))
    sequence.num_written = BLOCK * blocks
    sequence.lease = pool.open([], BLOCK * blocks)
    assert sequence.lease is not None
    sequence.lease.grow(BLOCK * blocks)
    return sequence


def make(places: int, block_seconds: float = 0.0) -> KeptKV:
    return KeptKV(KeptOptions(places, block_seconds), BLOCK, 0)


def test_places_are_found_where_others_have_left_them() -> None:
    pool, kept = BlockPool(20, BLOCK), make(6)
    first, second, third, fourth = (
        running(pool, i, n) for i, n in enumerate((2, 2, 2, 3), start=1)
    )
    assert kept.keep(first) == [Swap(True, 0, first.blocks)]
    assert kept.keep(second) == [Swap(True, 2, second.blocks)]
    assert kept.keep(fourth) == []  # no three are side by side
    assert kept.keep(third) == [Swap(True, 4, third.blocks)]
    kept.check_integrity([first, second, third])
    kept.drop(second)
    assert kept.num_blocks == 4
    again = running(pool, 5, 1)
    assert kept.keep(again) == [Swap(True, 2, again.blocks)]
    assert kept.num_kept == 4
    kept.check_integrity([first, third, again])
    with pytest.raises(RuntimeError, match="places of no sequence"):
        kept.check_integrity([])


def test_what_the_prefix_cache_has_is_not_brought_back() -> None:
    pool, kept = BlockPool(20, BLOCK), make(6)
    sequence = running(pool, 1, 3)
    kept.keep(sequence)
    assert sequence.lease is not None
    sequence.lease.release()
    sequence.lease = pool.open([], 3 * BLOCK)
    sequence.num_written = BLOCK  # found there
    assert sequence.lease is not None
    assert kept.bring_back(sequence) == [Swap(False, 1, sequence.blocks[1:])]
    assert sequence.num_written == 3 * BLOCK
    assert kept.num_blocks == 0


@pytest.mark.parametrize(("token_seconds", "copied"), [(0.1, True), (0.001, False)])
def test_what_is_quicker_is_done(token_seconds: float, copied: bool) -> None:
    """A block takes 0.2 s to copy, and has 4 tokens."""
    kept = make(6, block_seconds=0.2)
    kept.prefilled(10, 10 * token_seconds)
    assert bool(kept.keep(running(BlockPool(20, BLOCK), 1, 2))) == copied
