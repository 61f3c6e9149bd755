"""A link carries frames, ends in one way only, and harms nobody else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd_draft.records import TargetFrames, TargetLinkUp
from ssd_engine.speculation.frames import Branch, Branches, Notice, NoticeKind
from tests.draft.scripted_draft import Draft, frames, opening, run, scripted, status
from tests.waiting import wait_until_async

Code = grpc.StatusCode
ENDINGS = {
    "cancelled": "lost",
    "connection lost": "lost",
    "half-closed": "closed",
    "malformed": "malformed",
    "no message": "malformed",
    "engine": "not_serving",
}


@contextlib.asynccontextmanager
async def relay(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Another way to a server, and what cuts it."""
    host, port = address.rsplit(":", 1)
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()

    server = await asyncio.start_server(join, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        cut()
        server.close()


@pytest.mark.parametrize(("ending", "how"), ENDINGS.items())
def test_however_a_link_ends_the_engine_hears_of_it_once(ending: str, how: str) -> None:
    async def work() -> None:
        async with scripted() as draft, relay(draft.address) as (way, cut):
            async with draft.link(by=way) as (call, link):
                await call.write(frames(opening(1)))
                await wait_until_async(lambda: draft.engine.num_frames(link) == 1)
                if ending == "cancelled":
                    call.cancel()
                elif ending == "half-closed":
                    await call.done_writing()
                    assert (await status(call))[0] == Code.OK
                elif ending == "malformed":
                    await call.write(frames(pb.TargetFrame(sequence=1)))
                    code, text = await status(call)
                    assert code == Code.INVALID_ARGUMENT
                    assert text.startswith("frames.frames[0].body: is missing")
                elif ending == "no message":
                    await call.write(b"\xff")
                    assert (await status(call))[0] == Code.INVALID_ARGUMENT
                elif ending == "engine":
                    draft.engine.die()
                    code, text = await status(call)
                    assert code == Code.UNAVAILABLE
                    assert "the engine died" in text
                else:
                    assert ending == "connection lost"
                    cut()
                    assert (await status(call))[0] == Code.UNAVAILABLE
            await wait_until_async(lambda: draft.engine.downs() == [link])
            await wait_until_async(lambda: draft.servicer.num_active == 0)
            await answered(draft)
            assert draft.engine.downs() == [link]
            assert draft.engine.num_up == 0
            assert draft.engine.count().total() == 0
            # The end of a connection and the end of a stream may be told in either order.
            hows = {how, "closed"} if how == "lost" else {how}
            assert sum(draft.sample("ssd_draft_links_ended_total", how=h) for h in hows) == 1

    run(work)


def test_frames_arrive_in_order_and_one_bad_one_lets_none_of_its_message_pass() -> None:
    async def work() -> None:
        async with scripted() as draft, draft.link() as (call, link):
            for first in (0, 3):
                await call.write(frames(*(opening(first + i) for i in range(3))))
            await wait_until_async(lambda: draft.engine.num_frames(link) == 6)
            records = [r for r in draft.engine.said if isinstance(r, TargetFrames)]
            assert [f.sequence for r in records for f in r.frames] == list(range(6))
            await call.write(frames(opening(7), pb.TargetFrame()))
            assert (await status(call))[0] == Code.INVALID_ARGUMENT
            assert draft.engine.num_frames(link) == 6

    run(work)


def test_frames_of_another_epoch_are_dropped_and_counted() -> None:
    async def work() -> None:
        async with scripted() as draft, draft.link() as (call, link):
            await call.write(frames(opening(1), opening(2), epoch=3))
            await call.write(frames(opening(3)))
            await wait_until_async(lambda: draft.engine.num_frames(link) == 1)
            assert draft.sample("ssd_draft_frames_dropped_total", reason="epoch") == 2

    run(work)


def test_what_the_engine_says_arrives_with_epoch_and_load() -> None:
    async def work() -> None:
        async with scripted() as draft, draft.link(epoch=77) as (call, link):
            draft.engine.output(link, Branches(1, 2, [Branch(0, 5, 0, [7])]))
            heard = (await call.read()).frames
            assert heard.epoch == 77
            assert heard.load.open_sequences == 3
            assert heard.frames[0].branches.branches[0].tokens == [7]

    run(work)


def test_a_flood_stops_being_read_and_harms_no_other_link() -> None:
    """What the engine has not looked at is bounded: the rest stays in the target's connection."""

    async def work() -> None:
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

    run(work)


async def answered(draft: Draft) -> None:
    """Calls that came later have been answered: what was to happen before has happened."""
    for _ in range(3):
        async with grpc.aio.insecure_channel(draft.address) as channel:
            await channel.unary_unary("/ssd.v1.SpeculationService/GetDraftInfo")(b"")


async def _flood(call: grpc.aio.StreamStreamCall, messages: int) -> None:
    for i in range(messages):
        await call.write(frames(*(opening(3 * i + j) for j in range(3))))


def test_bytes_are_bounded_as_frames_are() -> None:
    async def work() -> None:
        async with (
            scripted(max_frames=10_000, max_bytes=2_000) as draft,
            draft.link() as (call, link),
        ):
            flood = asyncio.ensure_future(_flood(call, 20_000))
            messages = 2_000 // frames(*(opening(j) for j in range(3))).ByteSize()
            await wait_until_async(lambda: draft.engine.num_frames(link) >= 3 * messages)
            await answered(draft)
            assert draft.engine.num_frames(link) <= 3 * (messages + 2)
            flood.cancel()

    run(work)


def test_a_target_that_reads_nothing_is_left() -> None:
    async def work() -> None:
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

    run(work)


def test_while_a_target_reads_slowly_old_branches_go_and_notices_stay() -> None:
    async def work() -> None:
        async with scripted(max_frames=20) as draft, draft.link() as (call, link):
            large = [Branch(0, 5, 0, [70_000] * 1000)] * 20
            for i in range(300):
                draft.engine.output(link, Branches(i, 2, large))
                if i % 100 == 0:
                    draft.engine.output(link, Notice(i, 2, NoticeKind.LOST, "x"))
                await asyncio.sleep(0.001)
            dropped = draft.sample("ssd_draft_frames_dropped_total", reason="slow_reader")
            heard = []
            while len(heard) < 303 - dropped:
                heard += (await call.read()).frames.frames
            assert dropped > 0
            notices = [f.sequence for f in heard if f.WhichOneof("body") == "notice"]
            assert notices == [0, 100, 200]
            assert heard[-1].sequence == 299

    run(work)


def test_a_target_that_is_told_more_than_it_reads_is_left_before_memory_runs_out() -> None:
    async def work() -> None:
        async with scripted(max_frames=20) as draft, draft.link() as (call, link):
            said = [Notice(i, 0, NoticeKind.BUSY, "x" * 900) for i in range(20)]
            for _ in range(3000):
                draft.engine.output(link, *said)
                if draft.engine.downs():
                    break
                await asyncio.sleep(0)
            assert (await status(call))[0] == Code.DEADLINE_EXCEEDED

    run(work)


def test_everything_that_has_gathered_goes_in_one_message() -> None:
    async def work() -> None:
        async with scripted() as draft, draft.link() as (call, link):
            for i in range(50):
                draft.engine.output(link, Branches(i, 2, []))
            heard: list[int] = []
            messages = 0
            while len(heard) < 50:
                heard += [f.sequence for f in (await call.read()).frames.frames]
                messages += 1
            assert heard == list(range(50))
            assert messages <= 2

    run(work)


def test_info_counts_links_and_sequences() -> None:
    async def work() -> None:
        async with scripted() as draft, draft.link() as (_, link):
            draft.engine.output(link)
            async with grpc.aio.insecure_channel(draft.address) as channel:
                call = channel.unary_unary(
                    "/ssd.v1.SpeculationService/GetDraftInfo",
                    request_serializer=pb.GetDraftInfoRequest.SerializeToString,
                    response_deserializer=pb.GetDraftInfoResponse.FromString,
                )
                info = await call(pb.GetDraftInfoRequest())
                assert (info.name, info.links, info.open_sequences) == ("scripted", 1, 3)
                draft.servicer.serving = None
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call(pb.GetDraftInfoRequest())
                assert error.value.code() == Code.UNAVAILABLE

    run(work)


def test_the_engine_knows_the_interface_that_a_link_came_in_on() -> None:
    """There, and on no other, it waits for the link's tensor plane."""

    async def work() -> None:
        async with scripted() as draft, draft.link():
            up = next(record for record in draft.engine.said if isinstance(record, TargetLinkUp))
            assert up.interface == "127.0.0.1"

    asyncio.run(work())
