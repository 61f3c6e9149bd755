"""What a link lets pass: the frames of its target, and what its engine says."""

import asyncio

import pytest

from ssd_draft.front.link import Outbox, TargetLink, Window
from ssd_engine.errors import SSDError
from ssd_engine.speculation.frames import Branch, Branches, Notice, NoticeKind


def branches(sequence: int, tokens: int = 1) -> Branches:
    return Branches(sequence, 1, [Branch(0, 5, 0, [7] * tokens)])


def notice(sequence: int) -> Notice:
    return Notice(sequence, 1, NoticeKind.LOST, "gone")


async def test_the_first_failure_counts() -> None:
    link = TargetLink(1, 10, 10)
    link.fail(SSDError("first"))
    link.fail(SSDError("second"))
    assert str(link.failure.result()) == "first"


@pytest.mark.parametrize(
    ("bounds", "messages", "consumed"),
    [
        # Of the second message the last frame, too, has to go.
        ({"max_frames": 4, "max_bytes": 10**9}, [(3, 10), (5, 10)], [4, 1]),
        # Half of the first message: its bytes are still held.
        ({"max_frames": 100, "max_bytes": 1000}, [(2, 999), (2, 1)], [1, 1]),
    ],
    ids=["frames", "bytes"],
)
async def test_a_window_closes_at_its_bound_and_opens_below(
    bounds: dict[str, int], messages: list[tuple[int, int]], consumed: list[int]
) -> None:
    window = Window(**bounds)
    for frames, size in messages:
        assert await has_room(window)
        window.add(frames, size)
    for frames in consumed:
        assert not await has_room(window)
        window.consume(frames)
    assert await has_room(window)
    window.consume(window.frames)
    assert (window.frames, window._bytes) == (0, 0)


async def has_room(window: Window) -> bool:
    waiting = asyncio.ensure_future(window.room())
    await asyncio.sleep(0)  # it has looked
    return waiting.done() or not waiting.cancel()


class TestOutbox:
    async def test_a_message_has_a_largest_size_and_none_is_lost_over_it(self) -> None:
        outbox = Outbox(100)
        outbox.push([branches(i, tokens=30_000) for i in range(10)])
        pieces = []
        while len(outbox):
            pieces.append(await outbox.take())
        assert len(pieces) > 1
        assert [f.sequence for piece in pieces for f in piece] == list(range(10))

    async def test_the_oldest_branches_go_first_and_notices_stay(self) -> None:
        outbox = Outbox(3)
        assert outbox.push([branches(0), notice(1), branches(2)]) == 0
        assert outbox.push([branches(3), notice(4)]) == 2
        assert [f.sequence for f in await outbox.take()] == [1, 3, 4]
        assert not outbox.overfull

    async def test_notices_alone_can_be_too_many(self) -> None:
        outbox = Outbox(3)
        assert outbox.push([branches(0), *(notice(i) for i in range(4))]) == 1
        assert outbox.overfull
