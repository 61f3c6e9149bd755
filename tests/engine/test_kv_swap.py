"""KV blocks that go to the host's memory come back as they were."""

import torch

from ssd_engine.kv_cache import KVCache, KVCacheSpec
from ssd_engine.kv_swap import HostCopies, Swap, SwapKind


def make_cache() -> KVCache:
    cache = KVCache(KVCacheSpec(3, 2, 4, 5, torch.float32), torch.device("cpu"))
    cache.allocate(12)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def test_blocks_come_back_into_others() -> None:
    cache = make_cache()
    before, copies = cache.pool.clone(), HostCopies(cache)
    copies.apply(Swap(SwapKind.OUT, 7, 0, [4, 2, 9]))
    cache.pool[:, [4, 2, 9]] = 0
    copies.apply(Swap(SwapKind.IN, 7, 1, [5, 6]))
    assert torch.equal(cache.pool[:, 5], before[:, 2])
    assert torch.equal(cache.pool[:, 6], before[:, 9])
    assert not copies._copies


def test_a_copy_that_nobody_wants_is_dropped() -> None:
    copies = HostCopies(make_cache())
    copies.apply(Swap(SwapKind.OUT, 1, 0, [0]))
    copies.apply(Swap(SwapKind.DROP, 1))
    assert not copies._copies


def test_what_travels_to_other_ranks_is_the_same_there() -> None:
    swap = Swap(SwapKind.IN, 5, 2, [8, 1])
    assert Swap.decode(swap.encode()) == swap


def test_a_block_takes_some_time() -> None:
    cache = make_cache()
    before = cache.pool.clone()
    assert HostCopies(cache).seconds_of_a_block() > 0
    assert torch.equal(cache.pool, before)
