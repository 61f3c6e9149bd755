"""What a sequence has committed goes out before whatever ends its request."""

import asyncio

import pytest

from ssd_engine.errors import SSDError
from ssd_serving.engine.client import EngineGone
from ssd_serving.rpc.status import HandedOver, RequestFailed
from ssd_target.front.backlog import Backlog
from ssd_target.front.service import MAX_GATHERED, next_committed
from ssd_target.records.engine_records import Delta

WHY_NOT = "nothing can be drawn"
ENDS = {
    "engine gone": (EngineGone(WHY_NOT), EngineGone),
    "request failed": (Delta(1, [], None, 0, finished=True, error=WHY_NOT), RequestFailed),
    "handed over": (Delta(1, [], None, 0, finished=True, returned=True), HandedOver),
}


def committed(number: int) -> Delta:
    return Delta(1, [number], None, 0, finished=False)


@pytest.mark.parametrize(("end", "error"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("gathered", [0, 1, 2, 200])
def test_an_error_comes_after_all_that_was_committed(
    end: Delta | SSDError, error: type[SSDError], gathered: int
) -> None:
    async def take() -> list[int]:
        backlog, tokens = Backlog(), []
        for delta in [*map(committed, range(gathered)), end, EngineGone("stops")]:
            backlog.put_nowait(delta)
        with pytest.raises(error):
            while True:
                tokens += [
                    token for delta in await next_committed(backlog) for token in delta.tokens
                ]
        return tokens

    assert asyncio.run(take()) == [*range(gathered)]


def test_a_message_is_bounded_and_ends_with_the_last_tokens() -> None:
    async def take() -> list[int]:
        backlog = Backlog()
        for number in range(200):
            backlog.put_nowait(committed(number))
        backlog.put_nowait(Delta(1, [], None, 0, finished=True))
        sizes = [len(await next_committed(backlog))]
        while not backlog.empty():
            sizes.append(len(await next_committed(backlog)))
        return sizes

    first, *others = asyncio.run(take())
    assert sum([first, *others]) == 201
    assert 340 * (first - 1) < MAX_GATHERED <= 340 * first
