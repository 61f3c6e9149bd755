"""A client that reads slowly, or not at all, holds neither the engine nor our memory."""

import asyncio
import tracemalloc

import grpc
import msgspec
import pytest

from ssd.v1 import speculation_pb2 as pb_speculation
from ssd.v1 import target_pb2 as pb
from ssd_engine.sampling.params import Logprobs
from ssd_serving.engine.records import encode
from ssd_target.front.backlog import Backlog
from ssd_target.records.engine_records import Delta
from tests.processes import wait_until_idle
from tests.speculation.generations import (
    Pair,
    draft_info,
    is_empty,
    request,
    with_speculation,
)
from tests.waiting import wait_until
from tests.wire.raw import RawConnection, RawStream, framed, headers
from tests.wire.rpcs import frames, hello, rounds

GENERATE = "/ssd.v1.TargetService/Generate"
SPECULATE = "/ssd.v1.SpeculationService/Speculate"
OFF = pb.SPECULATION_MODE_OFF
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
LITTLE = 200  # bytes that a stalled client grants: not even the first tokens
STEPS = "ssd_engine_steps_total"
CUT = 'ssd_streams_cut_total{{bound="{}"}}'.format


def begin(client: RawConnection, message: pb.GenerateRequest) -> RawStream:
    return client.call(headers(GENERATE), framed(message.SerializeToString()))


def text_of(stream: RawStream) -> str:
    return "".join(pb.GenerateResponse.FromString(m).tokens.text for m in stream.messages())


class TestClientsThatReadSlowly:
    def test_what_fits_into_buffers_is_served_to_its_end(self, victims: Pair) -> None:
        message = with_speculation(request(13, 20), mode=OFF)
        [(text, _)] = victims.plain.of([message])
        with RawConnection(victims.target.address, 65_535) as client:
            stream = begin(client, message)
            client.until_ended(stream)
        assert stream.status[0] == 0
        assert text_of(stream) == text

    def test_they_get_all_of_it_in_larger_pieces_and_the_engine_does_not_wait(
        self, victims: Pair
    ) -> None:
        tokens = 50
        message = with_speculation(request(14, tokens), mode=OFF)
        message.logprobs.top_n = 5
        [(text, _)] = victims.plain.of([message])
        before = victims.target.metrics()[STEPS]
        with RawConnection(victims.target.address, LITTLE) as client:
            stream = begin(client, message)
            wait_until(lambda: victims.target.metrics()[STEPS] - before >= tokens)
            wait_until_idle(victims.target)
            client.listen(0.1)
            assert not stream.ended
            while not stream.ended:
                client.grant(stream, 500)
                client.listen(0.05)
        assert stream.status[0] == 0
        assert text_of(stream) == text
        assert len(stream.messages()) < tokens

    def test_one_that_falls_behind_too_far_is_told_so(self, victims: Pair) -> None:
        """It may take its time for a message; what gathers meanwhile is bounded."""
        before = victims.target.metrics()
        message = with_speculation(request(15, 1500), mode=OFF)
        message.logprobs.top_n = 20
        with RawConnection(victims.target.address, LITTLE) as client:
            stream = begin(client, message)
            wait_until(lambda: victims.target.metrics()[STEPS] > before[STEPS])
            wait_until_idle(victims.target)  # the engine has dropped it, long before its end
            client.grant(stream, 2**20)
            code, text = client.until_ended(stream).status
        assert code == DEADLINE_EXCEEDED
        assert "64 KiB of tokens behind (--max-backlog-kib)" in text
        after = victims.target.metrics()
        assert after[CUT("backlog")] == before[CUT("backlog")] + 1
        assert after[STEPS] - before[STEPS] < 1500


class TestTargetsThatNeverRead:
    def test_one_loses_its_link_and_what_it_holds(self, victims: Pair) -> None:
        process = victims.draft.process
        stalled = 'ssd_draft_links_ended_total{how="stalled"}'
        before = process.metrics().get(stalled, 0)
        opened = pb_speculation.SpeculateRequest.FromString(rounds()[0]).frames.frames[0]
        several = [pb_speculation.TargetFrame(sequence=i, open=opened.open) for i in range(8)]
        said = framed(hello(draft_info(process))) + framed(frames(*several))
        with RawConnection(process.address, LITTLE) as client:
            stream = client.call(headers(SPECULATE), said, end=False)
            wait_until(lambda: process.metrics()["ssd_sequences_active"] >= 8)
            wait_until(lambda: process.metrics().get(stalled, 0) > before)
            wait_until(lambda: is_empty(process))
            client.grant(stream, 2**20)
            code, text = client.until_ended(stream).status
        assert code == DEADLINE_EXCEEDED
        assert "--link-write-timeout" in text


@pytest.mark.parametrize("top", [None, 0, 20])
def test_the_size_of_a_backlog_is_about_that_of_its_memory(top: int | None) -> None:
    async def measure() -> float:
        best = tuple((3000 + i, -i / 7) for i in range(top or 0))
        logprobs = None if top is None else [Logprobs(-1.5, best)]
        data = [encode(Delta(7, [1000 + i], logprobs, 0, False)) for i in range(500)]
        backlog = Backlog()
        tracemalloc.start()
        try:
            for each in data:
                backlog.put_nowait(msgspec.msgpack.decode(each, type=Delta))
            used = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        return used / backlog.size

    assert 0.4 < asyncio.run(measure()) < 1.2
