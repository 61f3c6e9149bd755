"""Peers one minor version apart work together, in both directions; further apart they say so."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ssd.v1 import speculation_pb2
from ssd.v1 import target_pb2 as pb
from ssd_client.connection.endpoints import connect
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream import generate as client_generate
from tests.speculation.generations import SSD, Pair, draft_info, endpoint, is_up, request
from tests.waiting import HANG_SECONDS, wait_until
from tests.wire.contracts import RELEASED
from tests.wire.rpcs import hello
from tests.wire.skew_proxy import Apart, NextMinor, Released, SkewProxy

PROTOS = Path(__file__).resolve().parents[2] / "protos"
VERSIONS = {"released": Released, "next": NextMinor}
UNKNOWN_AT_TARGET = "ssd_link_unknown_frames_total"
UNKNOWN_AT_DRAFT = "ssd_draft_unknown_frames_total"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("of_client", [True, False], ids=["asking", "asked"])
class TestOneVersionApart:
    """The peer of another version is the one that asks: a client, a target; or the one asked."""

    def test_speculation_through_a_link(self, victims: Pair, version: str, of_client: bool) -> None:
        before, draft_before = victims.target.metrics(), victims.draft.process.metrics()
        told = len(victims.target.log())  # of others, who may have had the port before
        peer = VERSIONS[version]()
        with SkewProxy(victims.draft.address, peer, of_client) as proxy:
            message = request(0, 40, speculation={"mode": SSD, "endpoints": [proxy.address]})
            wait_until(lambda: self.came_in_time(victims, message))
            wait_until(lambda: is_up(victims.target, proxy.address))
            # A draft that gets no time on a busy machine falls silent, of whatever version it is.
            log = victims.target.log()[told:]
            downs = re.findall(rf"link to {proxy.address} is down: (.*)", log)
            assert {*downs} <= {"rounds stay unanswered", "no answer to hello"}
        assert peer.said["SpeculateRequest" if of_client else "SpeculateResponse"] > 3
        if version == "next":
            name = UNKNOWN_AT_DRAFT if of_client else UNKNOWN_AT_TARGET
            server = victims.draft.process if of_client else victims.target
            assert server.metrics()[name] > (draft_before if of_client else before)[name]

    def came_in_time(self, victims: Pair, message: pb.GenerateRequest) -> int:
        """Rounds for which branches were there, whether one of them was right or not."""
        stub = victims.target.stub()
        tokens: list[int] = []
        for response in stub.Generate(message, timeout=HANG_SECONDS):
            tokens += response.tokens.token_ids
        [(_, plain)] = victims.plain.of([message])
        assert tokens == plain
        stats = response.finish.speculation
        return int(stats.hits + stats.length_misses + stats.token_misses)

    def test_a_client_of_the_project(self, victims: Pair, version: str, of_client: bool) -> None:
        message = request(1, 30)
        [(text, tokens)] = victims.plain.of([message])
        before = victims.target.metrics()
        with contextlib.ExitStack() as stack:
            proxy = stack.enter_context(
                SkewProxy(victims.target.address, VERSIONS[version](), of_client)
            )
            endpoints = stack.enter_context(connect([proxy.address]))
            result = GenerationResult(Timing(0.0))
            for event in client_generate(endpoints, message, timeout_s=HANG_SECONDS):
                result.add(event, 0.0)
            assert endpoints[0].model_info(30).name == "stories-target"
        assert (result.text, list(result.token_ids)) == (text, tokens)
        assert result.finished is not None
        reason = result.finished.reason.value
        assert reason == ("unknown" if version == "next" and not of_client else "length")
        after = victims.target.metrics()
        for name in map('ssd_unknown_values_total{{field="{}"}}'.format, ("mode", "verification")):
            assert after[name] - before[name] == (version == "next" and of_client)


class TestFurtherApart:
    @pytest.mark.parametrize(
        ("version", "of_client", "advice"),
        [
            (Apart(3, 2), True, "upgrade the draft"),
            (Apart(0, 0), True, "upgrade the target"),
            (Apart(3, 2), False, "upgrade the target"),
            (Apart(0, 0), False, "upgrade the endpoint"),
        ],
        ids=["newer target", "older target", "newer draft", "older draft"],
    )
    def test_a_target_says_what_to_upgrade_and_goes_on_without(
        self, victims: Pair, version: Apart, of_client: bool, advice: str
    ) -> None:
        with SkewProxy(victims.draft.address, version, of_client) as proxy:
            message = request(2, 10, speculation={"mode": SSD, "endpoints": [proxy.address]})
            plain = victims.plain.of([message])

            def reason() -> str:
                found = endpoint(victims.target, proxy.address)
                return "" if found is None or found.state != "refused" else found.reason

            tokens: list[int] = []
            for response in victims.target.stub().Generate(message, timeout=HANG_SECONDS):
                tokens += response.tokens.token_ids
            assert tokens == plain[0][1]
            # Somebody else may have been refused at this port before.
            wait_until(lambda: advice in reason(), reason)

    def test_a_draft_refuses_with_the_right_status(self, victims: Pair) -> None:
        info = draft_info(victims.draft.process)
        far = hello(
            info,
            protocol_version=info.protocol_version + 2,
            oldest_protocol_version=info.protocol_version + 1,
        )
        with victims.draft.process.channel() as channel:
            speculate = channel.stream_stream("/ssd.v1.SpeculationService/Speculate")
            with pytest.raises(grpc.RpcError) as caught:
                list(speculate(iter([far]), timeout=HANG_SECONDS))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "upgrade the draft" in caught.value.details()

    def test_a_sequence_that_only_a_newer_draft_can_follow_is_refused_alone(
        self, victims: Pair
    ) -> None:
        info = draft_info(victims.draft.process)
        opening = speculation_pb2.Open(
            prompt=b"\7\0\0\0",
            max_tokens=20,
            sampling=pb.SamplingOptions(seed=1),
            verification=50,  # type: ignore[arg-type]
            depth=4,
        )
        frame = speculation_pb2.TargetFrame(sequence=9, open=opening)
        frames = speculation_pb2.TargetFrames(epoch=1, frames=[frame])
        said = [hello(info), speculation_pb2.SpeculateRequest(frames=frames).SerializeToString()]
        heard = self.said_before_the_end(victims, said)
        assert [f.sequence for f in heard] == [9]
        assert heard[0].notice.kind == speculation_pb2.NOTICE_KIND_REFUSED
        assert "upgrade the draft" in heard[0].notice.reason

    def said_before_the_end(
        self, victims: Pair, said: list[bytes]
    ) -> list[speculation_pb2.DraftFrame]:
        """The stream stays open until a frame has come."""
        heard: list[speculation_pb2.DraftFrame] = []
        more = threading.Event()

        def messages() -> Iterator[bytes]:
            yield from said
            more.wait(HANG_SECONDS)

        with victims.draft.process.channel() as channel:
            speculate = channel.stream_stream(
                "/ssd.v1.SpeculationService/Speculate",
                response_deserializer=speculation_pb2.SpeculateResponse.FromString,
            )
            for response in speculate(messages(), timeout=HANG_SECONDS):
                heard += response.frames.frames
                if heard:
                    more.set()
        return heard


def test_the_contract_keeps_what_was_released() -> None:
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "breaking", "--against", str(RELEASED)]
    result = subprocess.run(command, cwd=PROTOS, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
