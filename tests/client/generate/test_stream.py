"""Streaming and resuming against scripted servers: exact tokens, exact text, exact requests."""

from __future__ import annotations

import contextlib
import time
from concurrent import futures

import grpc
import pytest

from ssd.v1 import target_pb2
from ssd_client.connection import waiting
from ssd_client.connection.endpoints import connect
from ssd_client.connection.failover import RetryPolicy
from ssd_client.errors import (
    BadInputError,
    ClientError,
    DeadlineError,
    EndpointFullError,
    EndpointLostError,
    ModelMismatchError,
)
from ssd_client.generate import stream
from ssd_client.generate.events import FinishReason, Moved, Started, Tokens, Usage
from ssd_client.generate.request import (
    TextPrompt,
    build_request,
    pack_token_ids,
    resume_request,
)
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream import generate
from tests.client.scripted_target import (
    DRAWN_SEED,
    Script,
    full,
    full_text,
    full_tokens,
    invalid,
    serve,
    silence,
    status,
    token,
)
from tests.waiting import HANG_SECONDS, wait_until

QUICK = RetryPolicy(lost_wait_s=0.05, full_wait_s=0.05)


class FakeClock:
    """Time passes only by sleeping, and where a test lets it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        self.now += seconds


class LookingClock(FakeClock):
    """Time passes with each look, however long that takes."""

    def __init__(self, step: float = 0.25) -> None:
        super().__init__()
        self._step = step

    def monotonic(self) -> float:
        self.now += self._step
        return self.now


def run(addresses, request=None, *, result=None, events=None, on_event=None, **settings):
    """The result of a request, of a failed one too when `result` is given."""
    request = request or build_request(TextPrompt("Once"), RequestOptions())
    result = result or GenerationResult(Timing(sent=time.monotonic()))
    settings.setdefault("policy", QUICK)
    with connect(addresses) as endpoints:
        for event in generate(endpoints, request, **settings):
            result.add(event, time.monotonic())
            if events is not None:
                events.append(event)
            if on_event is not None:
                on_event(event)
    return result


def check_whole(result, count=12, seed=DRAWN_SEED):
    assert result.token_ids == full_tokens(count, seed)
    assert result.text == full_text(count, seed)
    assert result.finished.usage == Usage(4, count, 2)
    assert result.finished.reason is FinishReason.LENGTH


def test_a_plain_generation(start):
    server = start()
    request = build_request(TextPrompt("Once"), RequestOptions(request_id="mine", seed=3))
    events = []
    result = run([server.address], request, events=events)
    check_whole(result, seed=3)
    assert server.requests == [request]
    assert events[0] == Started(server.address, "mine", 3, 4, "model-a")
    assert (result.endpoints, result.resumed) == ([server.address], 0)


def test_a_finished_call_is_not_cancelled(start, monkeypatch):
    monkeypatch.setattr(stream, "_END_OF_CALL_S", HANG_SECONDS)
    server = start(linger_s=0.1)
    run([server.address])
    assert server.target.ended_well.wait(HANG_SECONDS)
    assert not server.target.cancelled.is_set()


BROKEN = [
    (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
    (grpc.StatusCode.UNAVAILABLE, "the server is draining"),
    (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    (grpc.StatusCode.UNKNOWN, "Stream removed"),
    (grpc.StatusCode.CANCELLED, "Cancelled on the server side"),
]


@pytest.mark.parametrize(("code", "details"), BROKEN)
@pytest.mark.parametrize("after", [1, 5, 12])  # 12: all but the finish had come
def test_a_lost_stream_is_resumed_exactly(start, code, details, after):
    first, second = start(abort_after=(after, code, details)), start()
    request = build_request(
        TextPrompt("Once"),
        RequestOptions(temperature=0.5, stop=("zzz",), max_tokens=None, logprobs=True),
    )
    events = []
    result = run([first.address, second.address], request, events=events)
    check_whole(result)
    assert len(result.logprobs) == 12
    assert first.requests == [request]
    assert second.requests == [resume_request(request, DRAWN_SEED, full_tokens(after))]
    moved = [event for event in events if isinstance(event, Moved)]
    assert [(m.origin, m.to, m.tokens) for m in moved] == [(first.address, second.address, after)]
    assert (result.endpoints, result.resumed) == ([first.address, second.address], 1)


def test_a_stream_that_ends_without_a_finish_is_resumed(start):
    first, second = start(end_after=3), start()
    check_whole(run([first.address, second.address]))
    assert second.requests[0].generated_token_ids == pack_token_ids(full_tokens(3))


def test_a_server_that_stops_is_left_for_the_next(start):
    first, second = start(hang_after=4), start()
    events = []

    def stop_after_four(event):
        if sum(isinstance(each, Tokens) for each in events) == 4:
            first.server.stop(0)

    check_whole(run([first.address, second.address], events=events, on_event=stop_after_four))
    assert [e.tokens for e in events if isinstance(e, Moved)] == [4]


def test_three_servers_in_turn(start):
    servers = [
        start(abort_after=(3, *BROKEN[0])),
        start(abort_after=(4, *BROKEN[0])),
        start(),
    ]
    result = run([each.address for each in servers])
    check_whole(result)
    assert [len(s.requests[0].generated_token_ids) // 4 for s in servers] == [0, 3, 7]
    assert result.resumed == 2


def test_the_given_seed_stays(start):
    first, second = start(abort_after=(2, *BROKEN[0])), start()
    request = build_request(TextPrompt("Once"), RequestOptions(seed=0))
    check_whole(run([first.address, second.address], request), seed=0)


def test_an_unreachable_endpoint_is_passed_over(start, nobody):
    server = start()
    request = build_request(TextPrompt("Once"), RequestOptions())
    events = []
    result = run([nobody, server.address], request, events=events)
    check_whole(result)
    assert server.requests == [request]
    assert events[0] == Moved(
        nobody, server.address, 0, False, 0.0, f"{nobody}: cannot connect: Connection refused"
    )
    assert result.resumed == 0


def test_without_a_token_the_request_is_sent_again_as_it_was(start):
    # The second server may even serve another model: nothing of the first was seen.
    first = start(abort_after=(0, *BROKEN[0]))
    second = start(fingerprint="model-b", abort_after=(3, *BROKEN[0]))
    third = start(fingerprint="model-b")
    request = build_request(TextPrompt("Once"), RequestOptions())
    check_whole(run([first.address, second.address, third.address], request))
    assert second.requests == [request]
    assert len(third.requests) == 1


def test_another_model_is_not_resumed_on(start):
    first = start(abort_after=(2, *BROKEN[0]))
    second = start(fingerprint="model-b", hang_after=4)  # it would go on, were it not cancelled
    result = GenerationResult(Timing(sent=0.0))
    with pytest.raises(ModelMismatchError, match=r"serves another model than .*model-b.*model-a"):
        run([first.address, second.address], result=result)
    assert result.token_ids == full_tokens(2)
    assert second.target.cancelled.wait(HANG_SECONDS)


def test_a_further_endpoint_that_fits_is_resumed_on(start):
    first = start(abort_after=(2, *BROKEN[0]))
    second, third = start(fingerprint="model-b"), start()
    result = run([first.address, second.address, third.address])
    check_whole(result)
    assert len(second.requests) == len(third.requests) == 1
    assert third.requests[0].generated_token_ids == pack_token_ids(full_tokens(2))


def test_a_single_endpoint_is_given_up(start):
    server = start(abort_after=(2, *BROKEN[0]))
    result = GenerationResult(Timing(sent=0.0))
    with pytest.raises(EndpointLostError, match=r"lost after 2 tokens \(Socket closed\); a second"):
        run([server.address], result=result)
    assert result.text == full_text(1)
    assert len(server.requests) == 1


def test_a_single_endpoint_that_comes_back_is_resumed_with_retries(start):
    server = start(abort_after=(5, *BROKEN[0]))
    result = run([server.address], policy=RetryPolicy(retries=2, lost_wait_s=0.01))
    check_whole(result)
    assert [len(r.generated_token_ids) // 4 for r in server.requests] == [0, 5, 10]


def test_a_restarted_server_is_found_again(nobody):
    policy = RetryPolicy(retries=9, lost_wait_s=0.1)
    with contextlib.ExitStack() as stack:

        def come_up_while_it_waits(event):
            if isinstance(event, Moved) and not servers:
                servers.append(stack.enter_context(serve(Script(), nobody)))

        servers = []
        check_whole(run([nobody], policy=policy, on_event=come_up_while_it_waits))
    assert len(servers[0].requests) == 1


FAILED = (grpc.StatusCode.INTERNAL, "engine failed: out of cheese")


@pytest.mark.parametrize("after", [0, 5])
def test_a_request_that_failed_goes_on_at_another_endpoint(start, after):
    first, second = start(abort_after=(after, *FAILED)), start()
    check_whole(run([first.address, second.address]))
    assert second.requests[0].generated_token_ids == pack_token_ids(full_tokens(after))


def test_a_request_that_fails_twice_is_not_tried_at_a_third_endpoint(start):
    servers = [start(abort_after=(2, *FAILED)) for _ in range(3)]
    result = GenerationResult(Timing(sent=0.0))
    with pytest.raises(ClientError, match=f"{servers[1].address}: engine failed") as info:
        run([each.address for each in servers], result=result)
    assert not isinstance(info.value, EndpointLostError)
    assert result.token_ids == full_tokens(4)
    assert [len(each.requests) for each in servers] == [1, 1, 0]


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("beat_millis", [2000, 0])
def test_a_stream_that_stands_still_is_resumed_exactly(start, monkeypatch, after, beat_millis):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    if beat_millis:
        first = start(hang_after=after, beat_millis=beat_millis)
    else:  # an old server has nothing to say, but that is before its first word
        first, after = start(refuse=silence), 0
    second, events = start(), []
    result = run([first.address, second.address], events=events, clock=LookingClock())
    check_whole(result)
    [moved] = [event for event in events if isinstance(event, Moved)]
    assert (moved.tokens, moved.to) == (after, second.address)
    assert "nothing came for 10 s" in moved.reason
    assert first.target.cancelled.wait(HANG_SECONDS)


def test_a_stream_with_nowhere_to_go_waits_where_it_is(start, monkeypatch):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    clock = LookingClock()
    long_silent = clock.now + 60.0
    check_whole(run([start(refuse=lambda _: wait_until(lambda: clock.now > long_silent)).address],
                    clock=clock))  # fmt: skip


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FAILED_PRECONDITION"])
def test_bad_input_is_not_tried_elsewhere(start, code):
    first, second = start(refuse=status(grpc.StatusCode[code], "no")), start()
    with pytest.raises(BadInputError, match=r"^no$"):
        run([first.address, second.address])
    assert second.requests == []


def test_the_message_of_a_field_violation_is_not_said_twice(start):
    text = "sampling.top_p: must be in (0, 1], got 1.5"
    server = start(refuse=invalid(text, "sampling.top_p", "must be in (0, 1], got 1.5"))
    with pytest.raises(BadInputError) as info:
        run([server.address])
    assert str(info.value) == text


def test_violations_stand_in_for_a_missing_message(start):
    server = start(refuse=invalid("", "stop.max_tokens", "too many"))
    with pytest.raises(BadInputError, match=r"^stop.max_tokens: too many$"):
        run([server.address])


def test_a_message_that_is_too_large_is_bad_input(start):
    server = start()
    with pytest.raises(BadInputError, match="larger than max"):
        run([server.address], target_pb2.GenerateRequest(text="x" * 5_000_000))


def test_a_full_endpoint_gives_way_to_the_next_at_once(start):
    first, second = start(refuse=full("queue full", 30.0)), start()
    events = []
    check_whole(run([first.address, second.address], events=events))
    assert [e.wait_s for e in events if isinstance(e, Moved)] == [0.0]


def test_full_endpoints_are_asked_again_after_their_delay(start):
    first, second = start(refuse=full("full", 20.0, times=1)), start(refuse=full("full", 30.0))
    events, clock = [], FakeClock()
    result = run([first.address, second.address], events=events, clock=clock)
    check_whole(result)
    assert clock.slept == [0.0, 20.0]
    assert (len(first.requests), len(second.requests)) == (2, 1)
    there, back = (each for each in events if isinstance(each, Moved))
    assert (there.to, there.full, there.wait_s) == (second.address, True, 0.0)
    assert (back.to, back.full, back.wait_s) == (first.address, True, 20.0)


def test_full_endpoints_are_not_asked_for_ever(start):
    server = start(refuse=full("queue full", 0.01))
    with pytest.raises(EndpointFullError, match=f"{server.address}: queue full"):
        run([server.address], policy=RetryPolicy(full_tries=3))
    assert len(server.requests) == 3


def test_a_resume_waits_for_a_full_endpoint_too(start):
    first = start(abort_after=(4, *BROKEN[0]))
    second = start(refuse=full("full", 0.05, times=2))
    result = run([first.address, second.address])
    check_whole(result)
    assert result.resumed == 1
    assert len(second.requests) == 3


def test_an_endpoint_that_runs_out_of_something_half_way_is_not_full(start):
    server = start(abort_after=(2, grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"))
    with pytest.raises(ClientError, match=f"{server.address}: out of memory"):
        run([server.address])
    assert len(server.requests) == 1


def test_a_full_endpoint_without_advice(start):
    server = start(refuse=full("full", None, times=1))
    check_whole(run([server.address]))


PASSED = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def test_the_deadline_ends_a_hanging_stream(start):
    server, other = start(hang_after=3), start()
    with pytest.raises(DeadlineError, match=r"not finished in time \(timeout 0.5 s\), \d tokens?$"):
        run([server.address, other.address], timeout_s=0.5)
    assert other.requests == []


def test_a_passed_deadline_is_not_tried_elsewhere(start):
    server, other = start(abort_after=(3, *PASSED)), start()
    result = GenerationResult(Timing(sent=0.0))
    with pytest.raises(DeadlineError, match=r"not finished in time \(timeout 900 s\), 3 tokens$"):
        run([server.address, other.address], result=result, timeout_s=900.0)
    assert result.token_ids == full_tokens(3)
    assert 0 < server.target.seconds_left[0] < 1000
    assert other.requests == []


def test_the_deadline_covers_all_attempts(start):
    first, second = start(abort_after=(4, *BROKEN[0])), start(abort_after=(1, *PASSED))
    clock = FakeClock()

    def pass_six_hundred_seconds(event):
        clock.now += 600.0 if isinstance(event, Moved) else 0.0

    with pytest.raises(DeadlineError, match=r"\(timeout 900 s\), 5 tokens$"):
        run([first.address, second.address], timeout_s=900.0, clock=clock,
            on_event=pass_six_hundred_seconds)  # fmt: skip
    assert 0 < second.target.seconds_left[0] < 400  # gRPC rounds what is left up


def test_the_deadline_is_not_slept_through(start):
    server, clock = start(refuse=full("queue full", 20.0)), FakeClock()
    with pytest.raises(DeadlineError, match=r"no time left .*timeout 10 s.*queue full"):
        run([server.address], timeout_s=10.0, clock=clock)
    assert clock.slept == []


def test_leaving_the_loop_cancels_the_call(start):
    server = start(hang_after=2)
    request = build_request(TextPrompt("Once"), RequestOptions())
    with connect([server.address]) as endpoints:
        with contextlib.closing(generate(endpoints, request)) as events:
            next(events)
            next(events)
        assert server.target.cancelled.wait(HANG_SECONDS)


def test_a_server_that_is_no_target():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ClientError, match="is it a target"):
            run([f"127.0.0.1:{port}"])
    finally:
        server.stop(0).wait()


def test_the_scripted_sequence_depends_on_the_seed():
    assert token(1, 5) != token(2, 5)  # else no test above could catch a lost seed
