"""The same beginning goes to the same target, unless that is busy or not ready."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.security import PLAIN
from ssd_gateway.targets.routing import in_order
from ssd_gateway.targets.target import Target


@pytest.fixture
def targets() -> Iterator[list[Target]]:
    """Five that are ready and idle; their channels never connect."""

    async def made() -> list[Target]:
        return [Target(f"10.0.0.{i}:7410", None, PLAIN) for i in range(5)]

    with asyncio.Runner() as runner:
        targets = runner.run(made())
        for each in targets:
            each.ready, each.info = True, pb.GetModelInfoResponse(max_num_seqs=8)
        yield targets
        for each in targets:
            runner.run(each.close())


def test_a_beginning_stays_and_beginnings_spread_also_where_a_target_comes(
    targets: list[Target],
) -> None:
    few = targets[:4]
    before, after = (
        [in_order(each, b"%d" % i)[0].address for i in range(400)] for each in (few, targets)
    )
    assert len(set(before)) == 4
    assert min(Counter(before).values()) > 50
    assert in_order(few, b"a")[0] is in_order(few[::-1], b"a")[0]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) < 160
    assert set(moved) == {targets[4].address}


def test_a_target_where_a_stream_stood_still_is_asked_last_of_those_that_are_ready(
    targets: list[Target],
) -> None:
    targets = targets[:3]
    favourite, second, third = in_order(targets, b"a")
    favourite.stood_still()
    third.ready = False
    assert in_order(targets, b"a") == [second, favourite, third]
    second.stood_still()  # nobody is left: they are as good as each other
    assert in_order(targets, b"a") == [favourite, second, third]


def test_a_busy_target_loses_its_beginnings_to_the_least_busy(targets: list[Target]) -> None:
    favourite = in_order(targets, b"a")[0]
    favourite.in_flight = 4  # half of its places: still its own
    assert in_order(targets, b"a")[0] is favourite
    favourite.in_flight = 6
    assert in_order(targets, b"a")[-1] is favourite
    favourite.in_flight, favourite.ready = 0, False
    assert in_order(targets, b"a")[-1] is favourite
