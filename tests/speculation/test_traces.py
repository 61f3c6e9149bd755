"""What services say of their rounds, and how a client puts it on one clock."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import trace_pb2, trace_pb2_grpc
from ssd_client.connection.endpoints import Endpoint, connect
from ssd_client.errors import ClientError
from ssd_client.status.traces import TraceEvent, TraceReader, between, perfetto
from ssd_engine.speculation.frames import Source
from tests.processes import Output, TargetProcess, TracedPair, collect
from tests.waiting import wait_until

TOKENS = 48


def end_of(event: TraceEvent) -> float:
    return event.begin + event.seconds


def generate(serving: TargetProcess, mode: "pb.SpeculationMode") -> Output:
    request = pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingOptions(temperature=0),
        stop=pb.StopOptions(max_tokens=TOKENS, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=mode),
    )
    return collect(serving.stub().Generate(request))


def traced(
    pair: TracedPair, mode: "pb.SpeculationMode"
) -> tuple[Output, list[TraceEvent], float, float]:
    with connect([service.address for service in pair]) as endpoints:
        readers = [TraceReader(endpoint) for endpoint in endpoints]
        begin = time.monotonic()
        output = generate(pair[0], mode)
        end = time.monotonic()
        events: list[TraceEvent] = []
        rounds = output.finish.speculation.rounds

        def all_told() -> bool:
            """What an idle engine noted goes out with its next step."""
            events.extend(event for reader in readers for event in reader.take())
            return sum(event.kind == "round" for event in events) >= rounds

        wait_until(all_told)
        assert not any(reader.lost for reader in readers)
    return output, between(events, begin, end), begin, end


def test_a_trace_tells_the_rounds_of_the_statistics_within_the_time_of_the_request(
    traced_pair: TracedPair,
) -> None:
    output, events, begin, end = traced(traced_pair, pb.SPECULATION_MODE_SSD)
    stats = output.finish.speculation
    rounds = [event for event in events if event.kind == "round"]
    assert len(rounds) == stats.rounds
    assert sum(event.accepted for event in rounds) == stats.accepted_tokens
    assert sum(event.tokens for event in rounds) == stats.drafted_tokens
    assert sum(event.look_up == "hit" for event in rounds) == stats.hits
    assert sum(event.look_up == "late" for event in rounds) == stats.late
    assert sum(event.origin == "cache" for event in rounds) == stats.cache_rounds
    assert [event.round for event in rounds] == list(range(1, stats.rounds + 1))
    positions = [sum(event.accepted > i for event in rounds) for i in range(5)]
    assert list(stats.accepted_per_position) == [n for n in positions if n]

    forwards = [e for e in events if (e.service, e.kind) == ("target", "forward")]
    assert len(forwards) == stats.rounds
    assert any((e.service, e.kind) == ("draft", "forward") for e in events)
    for event in forwards:
        assert begin <= event.begin <= end_of(event) <= end
    assert all(end_of(one) <= other.begin + 1e-6 for one, other in pairwise(forwards))


def test_sources_have_the_numbers_of_the_wire() -> None:
    origins = {name.removeprefix("TOKEN_ORIGIN_"): n for name, n in pb.TokenOrigin.items() if n}
    origins["NONE"] = origins.pop("TARGET")  # nobody had speculated it
    assert {source.name: source.value for source in Source} == origins


def test_every_token_says_where_it_was_known_first(traced_pair: TracedPair) -> None:
    request = pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingOptions(temperature=0),
        stop=pb.StopOptions(max_tokens=TOKENS, ignore_eos=True),
        speculation=pb.SpeculationOptions(mode=pb.SPECULATION_MODE_SYNC),
    )
    origins: list[int] = []
    for response in traced_pair[0].stub().Generate(request):
        assert len(response.tokens.origins) == len(response.tokens.token_ids)
        origins += response.tokens.origins
        stats = response.finish.speculation
    assert origins.count(pb.TOKEN_ORIGIN_SYNC) == stats.accepted_tokens > 0
    assert origins.count(pb.TOKEN_ORIGIN_TARGET) == len(origins) - stats.accepted_tokens
    assert origins[0] == pb.TOKEN_ORIGIN_TARGET


def test_without_the_option_no_trace_is_kept_and_the_answer_says_how(
    lone_target: TargetProcess,
) -> None:
    with (
        connect([lone_target.address]) as (endpoint,),
        pytest.raises(ClientError, match="--trace-events"),
    ):
        TraceReader(endpoint)


class ShiftedClock(trace_pb2_grpc.TraceServiceServicer):
    """A service whose clock is far from ours."""

    def GetClock(self, request: object, context: object) -> trace_pb2.GetClockResponse:
        return trace_pb2.GetClockResponse(clock_nanos=time.monotonic_ns() + SHIFT_NANOS)

    def GetTrace(
        self, request: trace_pb2.GetTraceRequest, context: object
    ) -> trace_pb2.GetTraceResponse:
        if request.first_event:
            return trace_pb2.GetTraceResponse(role="draft", next_event=0)
        now = time.monotonic_ns() + SHIFT_NANOS
        event = trace_pb2.TraceEvent(kind=99, begin_nanos=now, duration_nanos=10**6, look_up=77)
        return trace_pb2.GetTraceResponse(role="draft", events=[event], next_event=1)


SHIFT_NANOS = 3_600 * 10**9


def test_clocks_that_differ_are_brought_together() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    trace_pb2_grpc.add_TraceServiceServicer_to_server(ShiftedClock(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        before = time.monotonic()
        reader = TraceReader(Endpoint(f"127.0.0.1:{port}"))
        assert abs(reader.offset.seconds - 3600) <= reader.offset.error_s + 1e-4
        (event,) = reader.take()
        assert before <= event.begin + reader.offset.error_s
        assert event.begin <= time.monotonic() + reader.offset.error_s
        assert (event.kind, event.look_up) == ("", "")  # of a newer service
    finally:
        server.stop(None)


def test_a_viewer_gets_one_row_for_each_kind_of_each_service() -> None:
    def event(service: str, kind: str, begin: float, seconds: float) -> TraceEvent:
        return TraceEvent(service, "h:1", kind, begin, seconds, 1, 2, 3, 4, 1, "cache", "hit")

    content = perfetto([event("target", "forward", 5.0, 0.25), event("draft", "push", 5.1, 0.0)])
    names = {e["args"]["name"] for e in content["traceEvents"] if e["ph"] == "M"}
    assert names == {"target h:1", "draft h:1", "forward", "push"}
    span, moment = (e for e in content["traceEvents"] if e["ph"] != "M")
    assert (span["ph"], span["ts"], span["dur"], span["pid"]) == ("X", 0.0, 250_000.0, 1)
    assert (moment["ph"], round(moment["ts"]), moment["pid"]) == ("i", 100_000, 2)
    assert span["args"]["look_up"] == "hit"
