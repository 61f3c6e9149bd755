"""A link carries frames, ends in one way only, and harms nobody else."""

import asyncio

import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_engine.speculation.frames import Branch, Branches
from tests.draft.scripted_draft import EPOCH, Draft, frames, opening, scripted, status
from tests.waiting import wait_until_async

Code = grpc.StatusCode
# What ends a link: as what it is counted, and what the target hears.
ENDINGS = {
    "cancelled": ("lost", Code.CANCELLED, ""),
    "half-closed": ("closed", Code.OK, ""),
    "malformed": ("malformed", Code.INVALID_ARGUMENT, "frames.frames[0].body: is missing"),
    "no message": ("malformed", Code.INVALID_ARGUMENT, "is not a SpeculateRequest"),
    "engine": ("not_serving", Code.UNAVAILABLE, "the engine died"),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_however_a_link_ends_the_engine_hears_of_it_once(ending: str) -> None:
    how, code, words = ENDINGS[ending]
    async with scripted() as draft:
        async with draft.link() as (call, link):
            await call.write(frames(opening(1)))
            await wait_until_async(lambda: draft.engine.num_frames(link) == 1)
            if ending == "cancelled":
                call.cancel()
            elif ending == "half-closed":
                await call.done_writing()
            elif ending == "engine":
                draft.engine.die()
            else:
                await call.write(
                    b"\xff" if ending == "no message" else frames(pb.TargetFrame(sequence=1))
                )
            if ending != "cancelled":
                found, text = await status(call)
                assert found == code
                assert words in text
        await wait_until_async(lambda: draft.engine.downs() == [link])
        await wait_until_async(lambda: draft.servicer.num_active == 0)
        await answered(draft)
        assert draft.engine.downs() == [link]
        assert draft.engine.num_up == 0
        assert draft.engine.count().total() == 0
        # The end of a connection and the end of a stream may be told in either order.
        hows = {how, "closed"} if how == "lost" else {how}
        assert sum(draft.sample("ssd_draft_links_ended_total", how=h) for h in hows) == 1


async def test_frames_arrive_in_order_but_for_messages_with_a_bad_one_or_of_another_epoch() -> None:
    async with scripted() as draft, draft.link() as (call, link):
        for first in (0, 3):
            await call.write(frames(*(opening(first + i) for i in range(3))))
        await wait_until_async(lambda: draft.engine.num_frames(link) == 6)
        records = [r for r in draft.engine.said if isinstance(r, TargetFrames)]
        assert [f.sequence for r in records for f in r.frames] == list(range(6))
        await call.write(frames(opening(6), opening(7), epoch=EPOCH - 1))
        await call.write(frames(opening(7), pb.TargetFrame()))
        assert (await status(call))[0] == Code.INVALID_ARGUMENT
        assert draft.engine.num_frames(link) == 6
        assert draft.sample("ssd_draft_frames_dropped_total", reason="epoch") == 2


async def test_a_flood_stops_being_read_and_harms_no_other_link() -> None:
    """What the engine has not looked at is bounded: the rest stays in the target's connection."""
    async with scripted(max_frames=10) as draft, draft.link() as (call, link):
        flood = asyncio.ensure_future(_flood(call, 20_000))
        await wait_until_async(lambda: draft.engine.num_frames(link) >= 10)
        await answered(draft)
        assert draft.engine.num_frames(link) == 12  # four messages of three frames
        assert not flood.done()
        async with draft.link() as (other, second):
            await other.write(frames(opening(1)))
            await wait_until_async(lambda: draft.engine.num_frames(second) == 1)
        draft.engine.output(link, consumed=4)
        await wait_until_async(lambda: draft.engine.num_frames(link) == 15)
        await answered(draft)
        assert draft.engine.num_frames(link) == 15
        flood.cancel()


async def answered(draft: Draft) -> None:
    """Calls that came later have been answered: what was to happen before has happened."""
    for _ in range(3):
        async with grpc.aio.insecure_channel(draft.address) as channel:
            await channel.unary_unary("/ssd.v1.SpeculationService/GetDraftInfo")(b"")


async def _flood(call: grpc.aio.StreamStreamCall, messages: int) -> None:
    for i in range(messages):
        await call.write(frames(*(opening(3 * i + j) for j in range(3))))


async def test_a_target_that_reads_nothing_is_left() -> None:
    async with scripted(write_timeout=0.5) as draft, draft.link() as (call, link):
        large = Branches(1, 2, [Branch(0, 5, 0, [70_000] * 1000)] * 20)

        def is_left() -> bool:
            draft.engine.output(link, large)
            return bool(draft.engine.downs())

        await wait_until_async(is_left)
        code, text = await status(call)
        assert code == Code.DEADLINE_EXCEEDED
        assert "--link-write-timeout" in text
        assert draft.engine.downs() == [link]
        assert draft.sample("ssd_draft_links_ended_total", how="stalled") == 1


async def test_the_engine_knows_the_interface_that_a_link_came_in_on() -> None:
    """There, and on no other, it waits for the link's tensor plane."""
    async with scripted() as draft, draft.link():
        up = next(record for record in draft.engine.said if isinstance(record, TargetLinkUp))
        assert up.interface == "127.0.0.1"
