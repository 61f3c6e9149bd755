"""Streaming and resuming against scripted servers: exact tokens, exact text, exact requests."""

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
    EndpointFailedError,
    EndpointFullError,
    EndpointLostError,
    ModelMismatchError,
)
from ssd_client.generate import stream
from ssd_client.generate.events import FinishReason, Moved, Started, Usage
from ssd_client.generate.request import (
    TextPrompt,
    build_request,
    resume_request,
)
from ssd_client.generate.request_options import RequestOptions
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream import generate
from tests.client.scripted_target import (
    DRAWN_SEED,
    full,
    full_text,
    full_tokens,
    invalid,
    silence,
    status,
    unpack,
)
from tests.waiting import HANG_SECONDS, wait_until

QUICK = RetryPolicy(lost_wait_s=0.05, full_wait_s=0.05)


class FakeClock:
    """Time passes by sleeping, with each look if `step` is given, and where a test lets it."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 1000.0, step
        self.slept: list[float] = []

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        self.now += seconds


def run(servers, request=None, *, result=None, events=None, on_event=None, **settings):
    """The result of a request, of a failed one too when `result` is given."""
    request = request or build_request(TextPrompt("Once"), RequestOptions())
    result = result or GenerationResult(Timing(sent=time.monotonic()))
    settings.setdefault("policy", QUICK)
    with connect([getattr(each, "address", each) for each in servers]) as endpoints:
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


def resumed_at(server):
    """After how many tokens each of its requests went on."""
    return [len(unpack(each.generated_token_ids)) for each in server.requests]


def test_a_plain_generation(start):
    server, events = start(), []
    request = build_request(TextPrompt("Once"), RequestOptions(request_id="mine", seed=3))
    result = run([server], request, events=events)
    check_whole(result, seed=3)
    assert server.requests == [request]
    assert events[0] == Started(server.address, "mine", 3, 4, "model-a")
    assert (result.endpoints, result.resumed) == ([server.address], 0)


def test_a_finished_call_is_not_cancelled(start, monkeypatch):
    monkeypatch.setattr(stream, "_END_OF_CALL_S", HANG_SECONDS)
    server = start(linger_s=0.1)
    run([server])
    assert server.ended_well.wait(HANG_SECONDS)
    assert not server.cancelled.is_set()


LOST = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
FAILED = (grpc.StatusCode.INTERNAL, "engine failed: out of cheese")
PASSED = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
BROKEN = [
    LOST,
    (grpc.StatusCode.UNAVAILABLE, "the server is draining"),
    (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    (grpc.StatusCode.UNKNOWN, "Stream removed"),
    (grpc.StatusCode.CANCELLED, "Cancelled on the server side"),
]


@pytest.mark.parametrize(("code", "details"), BROKEN)
@pytest.mark.parametrize("after", [1, 5, 12])  # 12: all but the finish had come
def test_a_lost_stream_is_resumed_exactly(start, code, details, after):
    first, second, events = start(abort_after=(after, code, details)), start(), []
    options = RequestOptions(temperature=0.5, stop=("zzz",), max_tokens=None, logprobs=True)
    request = build_request(TextPrompt("Once"), options)
    result = run([first, second], request, events=events)
    check_whole(result)
    assert len(result.logprobs) == 12
    assert first.requests == [request]
    assert second.requests == [resume_request(request, DRAWN_SEED, full_tokens(after))]
    moved = [event for event in events if isinstance(event, Moved)]
    assert [(m.origin, m.to, m.tokens) for m in moved] == [(first.address, second.address, after)]
    assert (result.endpoints, result.resumed) == ([first.address, second.address], 1)


@pytest.mark.parametrize(
    ("scripts", "resumed"),
    [
        ([{"end_after": 3}, {}], [[0], [3]]),  # it ends without a finish
        ([{"abort_after": (3, *LOST)}, {"abort_after": (4, *LOST)}, {}], [[0], [3], [7]]),
        ([{"abort_after": (0, *FAILED)}, {}], [[0], [0]]),
        ([{"abort_after": (5, *FAILED)}, {}], [[0], [5]]),
        # Before a token is seen, another model may serve it as well.
        (
            [
                {"abort_after": (0, *LOST)},
                {"abort_after": (3, *LOST), "fingerprint": "model-b"},
                {"fingerprint": "model-b"},
            ],
            [[0], [0], [3]],
        ),
        # Afterwards only one that serves the same.
        ([{"abort_after": (2, *LOST)}, {"fingerprint": "model-b"}, {}], [[0], [2], [2]]),
        ([{"refuse": full("queue full", 30.0)}, {}], [[0], [0]]),
        ([{"refuse": full("full", None, times=1)}], [[0, 0]]),
        (
            [{"abort_after": (4, *LOST)}, {"refuse": full("full", 0.05, times=2)}],
            [[0], [4, 4, 4]],
        ),
    ],
)
def test_where_a_request_goes_on(start, scripts, resumed):
    servers = [start(**script) for script in scripts]
    check_whole(run(servers, build_request(TextPrompt("Once"), {"seed": 0})), seed=0)
    assert [resumed_at(each) for each in servers] == resumed


def test_an_unreachable_endpoint_is_passed_over(start, nobody):
    server, events = start(), []
    result = run([nobody, server], events=events)
    check_whole(result)
    reason = f"{nobody}: cannot connect: Connection refused"
    assert events[0] == Moved(nobody, server.address, 0, False, 0.0, reason)
    assert result.resumed == 0


def test_another_model_is_not_resumed_on(start):
    first = start(abort_after=(2, *LOST))
    second = start(fingerprint="model-b", hang_after=4)  # it would go on, were it not cancelled
    result = GenerationResult(Timing(sent=0.0))
    with pytest.raises(ModelMismatchError, match=r"serves another model than .*model-b.*model-a"):
        run([first, second], result=result)
    assert result.token_ids == full_tokens(2)
    assert second.cancelled.wait(HANG_SECONDS)


@pytest.mark.parametrize(
    ("scripts", "kind", "message", "tokens", "asked"),
    [
        (
            [{"abort_after": (2, *LOST)}],
            EndpointLostError,
            r"lost after 2 tokens \(Socket closed\); a second",
            2,
            [1],
        ),
        ([{"abort_after": (2, *FAILED)}] * 3, EndpointFailedError, "engine failed", 4, [1, 1, 0]),
        ([{"refuse": full("queue full", 0.01)}], EndpointFullError, ": queue full", 0, [5]),
        # Half way it is not full: it has run out of something.
        (
            [{"abort_after": (2, grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory")}],
            ClientError,
            ": out of memory",
            2,
            [1],
        ),
        # Bad input is not tried elsewhere.
        (
            [{"refuse": status(grpc.StatusCode.INVALID_ARGUMENT, "no")}, {}],
            BadInputError,
            "^no$",
            0,
            [1, 0],
        ),
        (
            [{"refuse": status(grpc.StatusCode.FAILED_PRECONDITION, "no")}, {}],
            BadInputError,
            "^no$",
            0,
            [1, 0],
        ),
        # The message of a field's violation is not said twice, and it stands in for a missing one.
        (
            [{"refuse": invalid("sampling.top_p: too high", "sampling.top_p", "too high")}],
            BadInputError,
            "^sampling.top_p: too high$",
            0,
            [1],
        ),
        (
            [{"refuse": invalid("", "stop.max_tokens", "too many")}],
            BadInputError,
            "^stop.max_tokens: too many$",
            0,
            [1],
        ),
        (
            [{"abort_after": (3, *PASSED)}, {}],
            DeadlineError,
            r"not finished in time \(timeout 900 s\), 3 tokens$",
            3,
            [1, 0],
        ),
    ],
)
def test_how_a_request_ends_that_cannot_go_on(start, scripts, kind, message, tokens, asked):
    servers, result = [start(**script) for script in scripts], GenerationResult(Timing(sent=0.0))
    with pytest.raises(kind, match=message):
        run(servers, result=result, timeout_s=900.0)
    assert result.token_ids == full_tokens(tokens)
    assert [len(each.requests) for each in servers] == asked
    assert 0 < servers[0].seconds_left[0] < 1000


def test_a_message_that_is_too_large_is_bad_input(start):
    with pytest.raises(BadInputError, match="larger than max"):
        run([start()], target_pb2.GenerateRequest(text="x" * 5_000_000))


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("beat_millis", [2000, 0])
def test_a_stream_that_stands_still_is_resumed_exactly(start, monkeypatch, after, beat_millis):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    if beat_millis:
        first = start(hang_after=after, beat_millis=beat_millis)
    else:  # an old server has nothing to say, but that is before its first word
        first, after = start(refuse=silence), 0
    second, events = start(), []
    check_whole(run([first, second], events=events, clock=FakeClock(step=0.25)))
    [moved] = [event for event in events if isinstance(event, Moved)]
    assert (moved.tokens, moved.to) == (after, second.address)
    assert "nothing came for 10 s" in moved.reason
    assert first.cancelled.wait(HANG_SECONDS)


def test_a_stream_with_nowhere_to_go_waits_where_it_is(start, monkeypatch):
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.01)
    clock = FakeClock(step=0.25)
    long_silent = clock.now + 60.0
    check_whole(run([start(refuse=lambda _: wait_until(lambda: clock.now > long_silent))],
                    clock=clock))  # fmt: skip


def test_full_endpoints_are_asked_again_after_their_delay(start):
    first, second = start(refuse=full("full", 20.0, times=1)), start(refuse=full("full", 30.0))
    events, clock = [], FakeClock()
    check_whole(run([first, second], events=events, clock=clock))
    assert clock.slept == [0.0, 20.0]
    assert [len(each.requests) for each in (first, second)] == [2, 1]
    moves = [(each.to, each.full, each.wait_s) for each in events if isinstance(each, Moved)]
    assert moves == [(second.address, True, 0.0), (first.address, True, 20.0)]


def test_the_deadline_covers_all_attempts(start):
    first, second = start(abort_after=(4, *LOST)), start(abort_after=(1, *PASSED))
    clock = FakeClock()

    def pass_six_hundred_seconds(event):
        clock.now += 600.0 if isinstance(event, Moved) else 0.0

    with pytest.raises(DeadlineError, match=r"\(timeout 900 s\), 5 tokens$"):
        run([first, second], timeout_s=900.0, clock=clock, on_event=pass_six_hundred_seconds)
    assert 0 < second.seconds_left[0] < 400  # gRPC rounds what is left up


def test_the_deadline_is_not_slept_through(start):
    server, clock = start(refuse=full("queue full", 20.0)), FakeClock()
    with pytest.raises(DeadlineError, match=r"no time left .*timeout 10 s.*queue full"):
        run([server], timeout_s=10.0, clock=clock)
    assert clock.slept == []


def test_a_server_that_is_no_target():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(ClientError, match="is it a target"):
        run([f"127.0.0.1:{port}"])
    server.stop(0)
