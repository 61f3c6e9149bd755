"""A head that is linked never ends the engine for want of memory."""

import logging
from collections.abc import Sequence

import pytest
import torch

from ssd_engine.speculation.features import FeatureNeeds, FeatureTerms
from ssd_target.engine.feature_watch import FeatureWatch
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions, SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from tests.synchronous import ByForward

HIDDEN = 4


class SmallRunner(ByForward):
    """It has room to tell so many boundaries."""

    features = None

    def __init__(self, most: int) -> None:
        super().__init__(64, lambda: None)
        self.most = most
        self.asked: list[tuple[int, ...]] = []

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        return True

    def watch(self, boundaries: Sequence[int]) -> None:
        self.asked.append(tuple(boundaries))
        if len(boundaries) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Target:
    def __init__(self, most: int, inside: tuple[int, ...] = ()) -> None:
        feed = FeatureFeed(FeatureOptions(HIDDEN), inside)
        self.now = 0.0
        self.speculator = SpeculationCoordinator(
            SpeculationOptions(), 9, feed=feed, clock=lambda: self.now
        )
        self.runner = SmallRunner(most)
        self.watch = FeatureWatch(self.runner, self.speculator)  # type: ignore[arg-type]

    def link(self, boundaries: tuple[int, ...], epoch: int = 1) -> None:
        terms = FeatureTerms(FeatureNeeds(boundaries, HIDDEN, "float32"))
        self.speculator.endpoints.connected(
            DraftLinkUp(1, epoch, False, 8, 2048, 5, features=terms)
        )

    def step(self) -> tuple[int, ...]:
        self.watch.follow()
        self.now += 1
        return self.speculator.feed.watched


def test_what_there_is_no_memory_for_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(most=2)
    target.link((1, 2, 3))
    with caplog.at_level(logging.WARNING):
        assert [target.step() for _ in range(40)] == [()] * 40
    assert target.runner.asked == [(1, 2, 3), ()]
    assert "--gpu-memory-utilization" in caplog.text
    target.now = 1000.0
    target.link((1, 2), epoch=2)
    assert target.step() == (1, 2)


def test_what_was_watched_before_goes_on() -> None:
    target = Target(most=2, inside=(4,))
    assert target.step() == (4,)
    target.link((1, 2))
    assert [target.step() for _ in range(3)] == [(4,)] * 3
    assert target.runner.asked == [(4,), (1, 2, 4), (4,)]


def test_where_there_is_memory_for_nothing_nothing_is_watched() -> None:
    target = Target(most=0, inside=(4,))
    assert [target.step() for _ in range(3)] == [()] * 3
    assert target.runner.asked == [(4,), ()]
