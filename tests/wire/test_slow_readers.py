"""A client that reads slowly, or not at all, holds neither the engine nor our memory."""

import asyncio
import time
import tracemalloc
from collections.abc import Callable

import grpc
import msgspec
import pytest

from ssd.v1 import speculation_pb2 as pb_speculation
from ssd.v1 import target_pb2 as pb
from ssd_engine.sampling_params import Logprobs
from ssd_engine.serving.records import encode
from ssd_target.backlog import Backlog
from ssd_target.records import Delta
from tests.processes import TargetProcess, wait_until_idle
from tests.speculation.generations import (
    Generations,
    Pair,
    draft_info,
    is_empty,
    request,
    wait_for,
    with_speculation,
)
from tests.wire.raw import RawConnection, RawStream, framed, headers
from tests.wire.rpcs import frames, hello, rounds

pytestmark = pytest.mark.services

GENERATE = "/ssd.v1.TargetService/Generate"
SPECULATE = "/ssd.v1.SpeculationService/Speculate"
OFF = pb.SPECULATION_MODE_OFF
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
LITTLE = 200  # bytes that a stalled client grants: not even the first tokens
CUT = 'ssd_streams_cut_total{{bound="{}"}}'.format


def begin(client: RawConnection, message: pb.GenerateRequest) -> RawStream:
    return client.call(headers(GENERATE), framed(message.SerializeToString()))


def text_of(stream: RawStream) -> str:
    return "".join(pb.GenerateResponse.FromString(m).tokens.text for m in stream.messages())


def read_slowly(
    client: RawConnection, stream: RawStream, rate: float, until: Callable[[], bool]
) -> None:
    """So many bytes a second, by the clock, until it ends or a condition holds."""
    last = time.monotonic()
    while not stream.ended and not until():
        now = time.monotonic()
        client.grant(stream, max(1, int(rate * (now - last))))
        last = now
        client.listen(0.05)


def wait_for_cuts(server: TargetProcess, bound: str, count: float) -> None:
    wait_for(lambda: server.metrics()[CUT(bound)] >= count)


class TestClientsThatNeverRead:
    def test_they_lose_their_place_and_others_go_on(self, victims: Pair) -> None:
        """Half of them break the bound in time, half the one in bytes, before it."""
        server = victims.target
        others = [request(seed, 150) for seed in range(2)]
        plain = victims.plain.of(others)
        before = server.metrics()
        silent = with_speculation(request(11, 100), mode=OFF)
        wordy = with_speculation(request(12, 1500), mode=OFF)
        wordy.logprobs.top_n = 20
        with RawConnection(server.address, LITTLE) as client:
            with Generations(server, others) as running:
                stalled = [begin(client, message) for message in (silent, silent, wordy, wordy)]
                wait_for_cuts(server, "write_timeout", before[CUT("write_timeout")] + 2)
                # None has read more, and the others have been streaming all the time.
                wait_until_idle(server)
            assert running.texts() == plain
            client.listen(0.1)
            assert not any(stream.ended for stream in stalled)
            # A status is there for those who come back to read.
            for stream in stalled:
                client.grant(stream, 2**20)
                code, text = client.until_ended(stream).status
                assert code == DEADLINE_EXCEEDED
                assert "--write-timeout" in text or "--max-backlog-kib" in text
        after = server.metrics()
        assert sum(after[CUT(b)] - before[CUT(b)] for b in ("write_timeout", "backlog")) == 4
        assert "Traceback" not in server.log()

    def test_what_fits_into_buffers_is_served_to_its_end(self, victims: Pair) -> None:
        message = with_speculation(request(13, 20), mode=OFF)
        [(text, _)] = victims.plain.of([message])
        with RawConnection(victims.target.address, 65_535) as client:
            stream = begin(client, message)
            client.until_ended(stream)
        assert stream.status[0] == 0
        assert text_of(stream) == text


class TestClientsThatReadSlowly:
    def test_they_get_all_of_it_in_larger_pieces_and_the_engine_does_not_wait(
        self, victims: Pair
    ) -> None:
        tokens = 50
        message = with_speculation(request(14, tokens), mode=OFF)
        message.logprobs.top_n = 5
        [(text, _)] = victims.plain.of([message])
        with RawConnection(victims.target.address, LITTLE) as client:
            stream = begin(client, message)
            wait_for(lambda: victims.target.metrics()["ssd_num_requests_running"] == 1)
            read_slowly(client, stream, 1000, until=lambda: self.engine_has_done(victims))
            assert not stream.ended
            read_slowly(client, stream, 1000, until=lambda: False)
        assert stream.status[0] == 0
        assert text_of(stream) == text
        assert len(stream.messages()) < tokens

    def engine_has_done(self, victims: Pair) -> bool:
        return victims.target.metrics()["ssd_num_requests_running"] == 0

    def test_one_that_falls_behind_too_far_is_told_so(self, victims: Pair) -> None:
        """It reads all the time, so that no write takes too long; but less than is written."""
        before = victims.target.metrics()[CUT("backlog")]
        message = with_speculation(request(15, 1500), mode=OFF)
        message.logprobs.top_n = 20
        with RawConnection(victims.target.address, LITTLE) as client:
            stream = begin(client, message)
            read_slowly(
                client, stream, 1000, lambda: victims.target.metrics()[CUT("backlog")] > before
            )
            client.grant(stream, 2**20)
            code, text = client.until_ended(stream).status
        assert code == DEADLINE_EXCEEDED
        assert "64 KiB of tokens behind (--max-backlog-kib)" in text
        wait_until_idle(victims.target)


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
            wait_for(lambda: process.metrics()["ssd_sequences_active"] >= 8)
            wait_for(lambda: process.metrics().get(stalled, 0) > before)
            wait_for(lambda: is_empty(process))
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
