"""KV blocks that go to the host's memory come back as they were."""

import pytest
import torch

from ssd_engine.errors import ConfigError
from ssd_engine.kvcache import host_copies
from ssd_engine.kvcache.cache import KVCache, KVCacheSpec
from ssd_engine.kvcache.host_copies import HostCopies
from ssd_engine.kvcache.swap import Swap


def make_copies() -> tuple[KVCache, HostCopies]:
    cache = KVCache(KVCacheSpec(3, 2, 4, 5, torch.float32), torch.device("cpu"))
    cache.allocate(12)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)))
    copies = HostCopies(cache)
    copies.allocate(6)
    return cache, copies


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_blocks_come_back_into_others(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "AT_A_TIME", at_a_time)
    cache, copies = make_copies()
    before = cache.pool.clone()
    for swap in (Swap(True, 2, [4, 2, 9]), Swap(True, 0, [1])):
        copies.apply(Swap.decode(swap.encode()))  # as it travels to other ranks
    cache.pool[:, [4, 2, 9]] = 0
    copies.apply(Swap(False, 3, [5, 6]))
    assert torch.equal(cache.pool[:, 5], before[:, 2])
    assert torch.equal(cache.pool[:, 6], before[:, 9])


def test_a_block_takes_some_time() -> None:
    cache, copies = make_copies()
    before = cache.pool.clone()
    assert copies.seconds_of_a_block() > 0
    assert torch.equal(cache.pool, before)


def test_memory_that_cannot_be_had_is_named() -> None:
    _, copies = make_copies()
    with pytest.raises(ConfigError, match=r"^--swap-gib: \d+\.\d GiB of the host's memory"):
        copies.allocate(10**13)
