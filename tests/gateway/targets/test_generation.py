"""One request behind the gateway, over scripted targets of which one stands still or fails."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.security import PLAIN
from ssd_client.connection.stall import LOOK_SECONDS, StallLooker
from ssd_client.errors import EndpointFailedError
from ssd_gateway.targets.generation import Generation
from ssd_gateway.targets.target import Target
from tests.client.scripted_target import ScriptedTarget, full_text, full_tokens, silence
from tests.waiting import HANG_SECONDS

FAILED = (grpc.StatusCode.INTERNAL, "the engine failed: out of cheese")
BEATS = {"beat_millis": 2000}


@dataclass
class Told:
    """What the reader of a generation has been told."""

    responses: list[pb.GenerateResponse] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def token_ids(self) -> list[int]:
        return [each for response in self.responses for each in response.tokens.token_ids]

    def is_whole(self) -> bool:
        text = "".join(response.tokens.text for response in self.responses)
        return (self.token_ids(), text) == (full_tokens(12), full_text(12))


async def follow(
    servers: list[ScriptedTarget], told: Told, time_passes: Callable[[], bool]
) -> Generation:
    """Reads one generation to its end. For who looks at streams time passes while the function
    says so, and only then."""
    now = [0.0]
    stalls = StallLooker(lambda: now[0])
    targets = [Target(each.address, None, PLAIN) for each in servers]
    for target in targets:
        target.ready = True
    told.targets = targets
    generation = Generation(
        targets, pb.GenerateRequest(text="Once"), lambda target: (), stalls, stall_timeout_s=10.0
    )

    async def read() -> None:
        async with aclosing(generation.responses()) as responses:
            async for response in responses:
                told.responses.append(response)

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
    start: Callable[..., ScriptedTarget], after: int
) -> None:
    first, second, told = start(hang_after=after, **BEATS), start(**BEATS), Told()
    generation = asyncio.run(follow([first, second], told, first.hanging.is_set))
    assert told.is_whole()
    starts = [each for each in told.responses if each.HasField("started")]
    assert len(starts) == (1 if after else 2)
    assert generation.num_moves == bool(after)
    assert generation.target.address == second.address
    assert [target.avoided for target in told.targets] == [True, False]
    assert first.cancelled.wait(HANG_SECONDS)


def test_a_target_that_does_not_even_answer_is_left_for_another(
    start: Callable[..., ScriptedTarget],
) -> None:
    """It has not said that it beats; nor could it have queued the request yet."""
    first, second, told = start(refuse=silence), start(), Told()

    def until_it_is_seen() -> bool:
        told.targets[0].ready = False
        return bool(first.requests)

    asyncio.run(follow([first, second], told, until_it_is_seen))
    assert told.is_whole()
    assert not any(target.avoided for target in told.targets)


@pytest.mark.parametrize("script", [{"refuse": silence}, {"hang_after": 5}])
def test_a_target_that_may_have_reasons_is_not_hurried(
    start: Callable[..., ScriptedTarget], script: dict[str, Any]
) -> None:
    """It answers others, and a template may take long; or it is an older one, without beats."""
    first, second, told = start(**script), start(**BEATS), Told()
    looks = iter(range(400))

    def until_it_ends() -> bool:
        asked = bool(first.requests)
        if asked and next(looks, None) is None:
            first.server.stop(0)
        return asked

    asyncio.run(follow([first, second], told, until_it_ends))
    assert next(looks, None) is None
    assert told.is_whole()


@pytest.mark.parametrize("after", [0, 5])
def test_a_request_that_a_target_fails_goes_on_at_another(
    start: Callable[..., ScriptedTarget], after: int
) -> None:
    first, second, told = start(abort_after=(after, *FAILED)), start(), Told()
    generation = asyncio.run(follow([first, second], told, lambda: False))
    assert told.is_whole()
    assert generation.num_moves == bool(after)


def test_a_request_that_fails_twice_ends_with_the_error(
    start: Callable[..., ScriptedTarget],
) -> None:
    """Also where tokens came in between: what is tried a third time may fail all of them."""
    first, second = start(abort_after=(0, *FAILED)), start(abort_after=(5, *FAILED))
    third, told = start(), Told()
    with pytest.raises(EndpointFailedError, match="out of cheese"):
        asyncio.run(follow([first, second, third], told, lambda: False))
    assert told.token_ids() == full_tokens(5)
    assert (len(first.requests), len(third.requests)) == (1, 0)
