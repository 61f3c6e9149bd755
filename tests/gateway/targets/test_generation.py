"""One request behind the gateway, over scripted targets of which one stands still or fails."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.security import PLAIN
from ssd_client.connection.stall import LOOK_SECONDS, StallLooker
from ssd_client.errors import EndpointFailedError
from ssd_gateway.targets.generation import Generation
from ssd_gateway.targets.target import Target
from tests.client.scripted_target import Running, Script, full_text, full_tokens, serve, silence
from tests.waiting import HANG_SECONDS

FAILED = (grpc.StatusCode.INTERNAL, "the engine failed: out of cheese")
BEATS = {"beat_millis": 2000}


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:
        yield lambda **script: stack.enter_context(serve(Script(**script)))


class Told:
    """What the reader of a generation has been told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.kinds: list[str] = []
        self.targets: list[Target] = []

    def take(self, response: pb.GenerateResponse) -> None:
        self.kinds.append(str(response.WhichOneof("event")))
        self.token_ids += response.tokens.token_ids
        self.text += response.tokens.text

    def is_whole(self) -> bool:
        return (self.token_ids, self.text) == (full_tokens(12), full_text(12))


async def follow(servers: list[Running], told: Told, time_passes: Callable[[], bool]) -> Generation:
    """Reads one generation to its end. For who looks at streams time passes while the function
    says so, and only then."""
    now = [0.0]
    stalls = StallLooker(lambda: now[0])
    told.targets = targets = [Target(each.address, None, PLAIN) for each in servers]
    for target in targets:
        target.ready = True
    generation = Generation(
        targets, pb.GenerateRequest(text="Once"), lambda target: (), stalls, stall_timeout_s=10.0
    )

    async def read() -> None:
        async with aclosing(generation.responses()) as responses:
            async for response in responses:
                told.take(response)

    reading = asyncio.ensure_future(read())
    try:
        while not reading.done():
            if time_passes():
                now[0] += LOOK_SECONDS
                stalls.look()
            await asyncio.sleep(0.005)
        await reading
    finally:
        for target in targets:
            await target.close()
    return generation


@pytest.mark.parametrize("after", [0, 5])
def test_a_target_that_stands_still_is_left_for_another(
    start: Callable[..., Running], after: int
) -> None:
    first, second, told = start(hang_after=after, **BEATS), start(**BEATS), Told()
    generation = asyncio.run(follow([first, second], told, first.target.hanging.is_set))
    assert told.is_whole()
    assert told.kinds.count("started") == (1 if after else 2)
    assert generation.num_moves == bool(after)
    assert generation.target.address == second.address
    assert [target.avoided for target in told.targets] == [True, False]
    assert first.target.cancelled.wait(HANG_SECONDS)


def test_a_target_that_does_not_even_answer_is_left_for_another(
    start: Callable[..., Running],
) -> None:
    """It has not said that it beats; nor could it have queued the request yet."""
    first, second, told = start(refuse=silence), start(), Told()

    def until_it_is_seen() -> bool:
        told.targets[0].ready = False
        return bool(first.requests)

    asyncio.run(follow([first, second], told, until_it_is_seen))
    assert told.is_whole()
    assert not any(target.avoided for target in told.targets)


def test_a_target_that_is_still_reading_the_request_is_not_left(
    start: Callable[..., Running],
) -> None:
    """It answers others: a template may take long."""
    first, second, told = start(refuse=silence), start(), Told()
    looks = iter(range(400))

    def until_it_ends() -> bool:
        if first.requests and next(looks, None) is None:
            first.server.stop(0)
        return bool(first.requests)

    asyncio.run(follow([first, second], told, until_it_ends))
    assert next(looks, None) is None
    assert told.is_whole()


def test_a_target_without_beats_is_not_hurried(start: Callable[..., Running]) -> None:
    first, second, told = start(hang_after=5), start(**BEATS), Told()
    looks = iter(range(400))

    def until_it_ends() -> bool:
        if first.target.hanging.is_set() and next(looks, None) is None:
            first.server.stop(0)
        return first.target.hanging.is_set()

    asyncio.run(follow([first, second], told, until_it_ends))
    assert next(looks, None) is None
    assert told.is_whole()


@pytest.mark.parametrize("after", [0, 5])
def test_a_request_that_a_target_fails_goes_on_at_another(
    start: Callable[..., Running], after: int
) -> None:
    first, second, told = start(abort_after=(after, *FAILED)), start(), Told()
    generation = asyncio.run(follow([first, second], told, lambda: False))
    assert told.is_whole()
    assert generation.num_moves == bool(after)


def test_a_request_that_fails_twice_ends_with_the_error(start: Callable[..., Running]) -> None:
    """Also where tokens came in between: what is tried a third time may fail all of them."""
    first, second = start(abort_after=(0, *FAILED)), start(abort_after=(5, *FAILED))
    third, told = start(), Told()
    with pytest.raises(EndpointFailedError, match="out of cheese"):
        asyncio.run(follow([first, second, third], told, lambda: False))
    assert told.token_ids == full_tokens(5)
    assert (len(first.requests), len(third.requests)) == (1, 0)
