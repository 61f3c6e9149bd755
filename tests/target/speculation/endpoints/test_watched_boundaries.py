"""What is watched follows who reads, and no endpoint makes a device capture its steps often."""

import logging
from typing import Any

import pytest
import torch

from ssd_engine.speculation.features import MAX_BOUNDARIES, FeatureNeeds, FeatureTerms
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import FeatureOptions
from ssd_target.speculation.endpoints.endpoint import BACK_SECONDS, DraftEndpoint
from ssd_target.speculation.endpoints.feature_feed import FeatureFeed
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.endpoints.watched_boundaries import (
    MOST_BOUNDARIES,
    WATCH_SECONDS,
    WatchedBoundaries,
)
from tests.target.speculation.endpoints.test_feature_feed import HIDDEN, Kept, reader


def connect(endpoint: DraftEndpoint, boundaries: tuple[int, ...], now: float) -> None:
    """Its next epoch. With none it reads nothing."""
    needs = FeatureNeeds(boundaries, HIDDEN, "float32")
    terms = FeatureTerms(needs) if boundaries else None
    up = DraftLinkUp(endpoint.link, int(now) + 2, False, 8, 2048, 5, features=terms)
    endpoint.connect(up, now)
    endpoint.features = Kept(needs) if boundaries else None


def test_what_is_watched_follows_who_reads() -> None:
    watched = WatchedBoundaries()
    one, other = reader(1, (1, 3)), reader(2, (3,))
    model = DraftEndpoint(3, Payoff(False))
    model.connect(DraftLinkUp(3, 1, False, 8, 2048, 5))
    assert watched.wanted([model], 0.0) == ()
    watched.watch(watched.wanted([one, model], 0.0), 0.0)
    assert watched.now == (1, 3)
    assert watched.wanted([other], 0.0) == (1, 3)  # not narrowed while somebody reads
    other.disconnect(now=100.0)
    assert watched.wanted([other], 100.0 + BACK_SECONDS - 1) == (1, 3)  # it may come back
    connect(other, (), 101.0)  # without
    assert watched.wanted([other], 100.0 + BACK_SECONDS - 1) == (1, 3)
    assert watched.wanted([other], 100.0 + BACK_SECONDS) == ()


def test_beside_a_head_inside_what_was_captured_stays() -> None:
    feed = FeatureFeed(FeatureOptions(HIDDEN), inside=(2,))
    assert feed.wanted([], 0.0) == (2,)
    feed.watch((2,), 0.0)
    feed.watch(feed.wanted([reader(1, (1, 3))], 0.0), 0.0)
    assert feed.watched == (1, 2, 3)
    assert feed.wanted([], 1000.0) == (1, 2, 3)
    features = torch.arange(3 * HIDDEN).unsqueeze(0)
    assert feed.read_inside(features).tolist() == [[*range(HIDDEN, 2 * HIDDEN)]]


def follows_another(second: int) -> list[DraftEndpoint]:
    return [reader(1, (second % 30,))]


def comes_back_without(second: int) -> list[DraftEndpoint]:
    """It leaves features out in between, so that nothing is watched; then it has others."""
    endpoint = DraftEndpoint(1, Payoff(False))
    for before in (second - 1, second):
        endpoint.disconnect(float(before))
        connect(endpoint, (before % 30,) if before % 2 else (), float(before))
    return [endpoint]


def is_forgotten(second: int) -> list[DraftEndpoint]:
    return [] if second % 2 else [reader(second, (second % 30,))]


@pytest.mark.parametrize("ask", [follows_another, comes_back_without, is_forgotten])
def test_endpoints_that_ask_for_ever_other_boundaries_are_not_followed_often(ask: Any) -> None:
    """The device knows the last boundaries that it has captured its steps for."""
    watched, captured, changes = WatchedBoundaries(), (), 0
    for second in range(600):
        wanted = watched.wanted(ask(second), float(second))
        if wanted != watched.now:
            watched.watch(wanted, float(second))
            changes += wanted not in ((), captured)
            captured = wanted or captured
    assert 1 < changes <= 1 + 600 / WATCH_SECONDS


@pytest.mark.parametrize(
    ("state", "later"),
    [(None, ()), (PlaneState.BROKEN, ()), (PlaneState.CONNECTING, (1, 3))],
    ids=["never agreed", "never up", "on its way"],
)
def test_nothing_is_watched_for_long_for_who_cannot_be_told(
    state: PlaneState | None, later: tuple[int, ...]
) -> None:
    endpoint, watched = reader(1, (1, 3)), WatchedBoundaries()
    if state is None:
        endpoint.features = None
    else:
        endpoint.features.state = state
    assert watched.wanted([endpoint], BACK_SECONDS - 1) == (1, 3)  # its plane may still come
    assert watched.wanted([endpoint], BACK_SECONDS) == later


def test_no_more_boundaries_are_watched_than_there_is_room_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who was named by the operator comes first; who is left out is named in the log, once."""
    greedy = [reader(i, tuple(range(i, i + MAX_BOUNDARIES))) for i in (10, 20)]
    for each in greedy:
        each.named = True
    honest, watched = reader(3, (1, 2, 3)), WatchedBoundaries()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            wanted = watched.wanted([*greedy, honest], 0.0)
    assert wanted == (1, 2, 3, *range(10, 10 + MAX_BOUNDARIES))
    assert len(wanted) <= MOST_BOUNDARIES
    assert [record.getMessage()[:7] for record in caplog.records] == ["link 20"]


def test_what_there_is_no_memory_for_is_not_tried_again_by_the_same_link() -> None:
    endpoint, other = reader(1, (1, 3)), reader(2, (5,))
    watched = WatchedBoundaries()
    assert watched.wanted([endpoint], 0.0) == (1, 3)
    watched.give_up((1, 3), [endpoint], 0.0)
    assert watched.wanted([endpoint], 1000.0) == ()
    assert watched.wanted([endpoint, other], 1.0) == ()
    assert watched.wanted([endpoint, other], WATCH_SECONDS) == (5,)
    endpoint.disconnect(1000.0)
    connect(endpoint, (1, 3), 1001.0)
    assert watched.wanted([endpoint], 1001.0) == (1, 3)
    inside = WatchedBoundaries(inside=(2,))
    inside.give_up((2,), [], 0.0)
    assert inside.wanted([], 1000.0) == ()


def test_nothing_is_kept_of_links_that_are_gone() -> None:
    """Pods come and go for months: some are left out, for others there is no memory."""
    watched, stays = WatchedBoundaries(), reader(0, (1, 3))
    watched.watch(watched.wanted([stays], 0.0), 0.0)
    for link in range(1, 400, 2):
        many = reader(link, tuple(range(4, 4 + MOST_BOUNDARIES)))
        other = reader(link + 1, (2,))
        watched.wanted([stays, many, other], 0.0)
        watched.give_up((1, 2, 3), [stays, many, other], 0.0)
    watched.wanted([stays], 0.0)
    assert watched._given_up == watched._left_out == set()
