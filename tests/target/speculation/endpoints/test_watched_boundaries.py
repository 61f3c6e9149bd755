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


def broken(endpoint: Any, state: PlaneState = PlaneState.BROKEN) -> Any:
    endpoint.features.state = state
    return endpoint


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


def changes_in(seconds: int, ask: Any) -> int:
    """How often a device captures its steps; it knows the last ones that it has captured."""
    watched, captured, changes = WatchedBoundaries(), (), 0
    for second in range(seconds):
        wanted = watched.wanted(ask(second), float(second))
        if wanted != watched.now:
            watched.watch(wanted, float(second))
            changes += wanted not in ((), captured)
            captured = wanted or captured
    return changes


def test_endpoints_that_ask_for_ever_other_boundaries_are_not_followed_often() -> None:
    changes = changes_in(600, lambda second: [reader(1, (second % 30,))])
    assert 1 < changes <= 1 + 600 / WATCH_SECONDS


def test_nor_are_those_that_leave_features_out_in_between() -> None:
    """They come back without, so that nothing is watched; then with others."""
    endpoint = DraftEndpoint(1, Payoff(False))

    def ask(second: int) -> list[DraftEndpoint]:
        if endpoint.up:
            endpoint.disconnect(float(second))
        connect(endpoint, (second % 30,) if second % 2 else (), float(second))
        return [endpoint]

    assert 1 < changes_in(600, ask) <= 1 + 600 / WATCH_SECONDS


def test_nor_are_links_that_are_forgotten_in_between() -> None:
    changes = changes_in(600, lambda s: [] if s % 2 else [reader(s, (s % 30,))])
    assert 1 <= changes <= 1 + 600 / WATCH_SECONDS


def test_what_a_link_read_is_watched_while_it_may_come_back() -> None:
    endpoint = DraftEndpoint(1, Payoff(False))
    connect(endpoint, (1, 3), 0.0)
    endpoint.disconnect(100.0)
    connect(endpoint, (), 101.0)
    watched = WatchedBoundaries()
    watched.watch((1, 3), 0.0)
    assert watched.wanted([endpoint], 100.0 + BACK_SECONDS - 1) == (1, 3)
    assert watched.wanted([endpoint], 100.0 + BACK_SECONDS) == ()


@pytest.mark.parametrize("state", [None, PlaneState.BROKEN], ids=["never agreed", "never up"])
def test_nothing_is_watched_for_long_for_who_cannot_be_told(state: PlaneState | None) -> None:
    endpoint = reader(1, (1, 3))
    if state is None:
        endpoint.features = None
    else:
        broken(endpoint, state)
    watched = WatchedBoundaries()
    assert watched.wanted([endpoint], BACK_SECONDS - 1) == (1, 3)  # its plane may still come
    assert watched.wanted([endpoint], BACK_SECONDS) == ()
    connecting = broken(reader(2, (1, 3)), PlaneState.CONNECTING)
    assert watched.wanted([connecting], BACK_SECONDS) == (1, 3)


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


def test_a_head_may_read_so_many_boundaries_and_no_more() -> None:
    for count in (1, MAX_BOUNDARIES, MAX_BOUNDARIES + 1):
        problem = FeatureNeeds(tuple(range(count)), 8, "float32").problem_with(8, 64)
        assert (problem is None) == (count <= MAX_BOUNDARIES)
    assert problem == ("boundaries", f"1 to {MAX_BOUNDARIES} are possible, got {count}")


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
