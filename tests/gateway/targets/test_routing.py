"""The same beginning goes to the same target, unless that is busy or not ready."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.security import PLAIN
from ssd_gateway.targets.routing import in_order
from ssd_gateway.targets.target import Target

Make = Callable[[int], list[Target]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Targets that are ready and idle; their channels never connect."""
    with asyncio.Runner() as runner:
        made: list[Target] = []

        async def targets(count: int) -> list[Target]:
            for i in range(count):
                target = Target(f"10.0.0.{i}:7410", None, PLAIN)
                target.ready, target.info = True, pb.GetModelInfoResponse(max_num_seqs=8)
                made.append(target)
            return made

        async def close() -> None:
            for target in made:
                await target.close()

        yield lambda count: runner.run(targets(count))
        runner.run(close())


def test_a_beginning_stays_and_beginnings_spread(make: Make) -> None:
    targets = make(4)
    firsts = Counter(in_order(targets, b"%d" % i)[0].address for i in range(400))
    assert len(firsts) == 4
    assert min(firsts.values()) > 50
    assert in_order(targets, b"a")[0] is in_order(targets[::-1], b"a")[0]


def test_who_comes_moves_few_beginnings(make: Make) -> None:
    targets = make(5)
    few, all_ = targets[:4], targets
    moved = [
        i for i in range(400) if in_order(few, b"%d" % i)[0] is not in_order(all_, b"%d" % i)[0]
    ]
    assert len(moved) < 160
    assert {in_order(all_, b"%d" % i)[0] for i in moved} == {targets[4]}


def test_a_target_where_a_stream_stood_still_is_asked_last_of_those_that_are_ready(
    make: Make,
) -> None:
    targets = make(3)
    favourite, second, third = in_order(targets, b"a")
    favourite.stood_still()
    third.ready = False
    assert in_order(targets, b"a") == [second, favourite, third]
    second.stood_still()  # nobody is left: they are as good as each other
    assert in_order(targets, b"a") == [favourite, second, third]


def test_a_busy_target_loses_its_beginnings_to_the_least_busy(make: Make) -> None:
    targets = make(3)
    favourite = in_order(targets, b"a")[0]
    favourite.in_flight = 4  # half of its places: still its own
    assert in_order(targets, b"a")[0] is favourite
    favourite.in_flight = 6
    assert in_order(targets, b"a")[-1] is favourite


def test_a_target_that_is_not_ready_comes_last(make: Make) -> None:
    targets = make(3)
    favourite = in_order(targets, b"a")[0]
    favourite.ready = False
    assert in_order(targets, b"a")[-1] is favourite
