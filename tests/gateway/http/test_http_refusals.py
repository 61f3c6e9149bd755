"""Refusals are JSON with the request's id, and are counted; who sends nothing more is answered."""

import json
import threading
from collections.abc import Iterator

import pytest

from ssd_client.errors import (
    DeadlineError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
)
from ssd_gateway.http.errors import api_error
from tests.client.scripted_target import Script, ScriptedTarget, serve
from tests.gateway.callers import connect, exchange, metrics, post
from tests.processes import GatewayProcess, gateway
from tests.waiting import wait_until

HOST = b"host: 127.0.0.1\r\n"
ID = b"x-request-id: hen-1\r\n"
LAST = b"connection: close\r\n"
ASK, COMPLETIONS = json.dumps({"prompt": "Tell"}).encode(), "/v1/completions"


def get(path: bytes, headers: bytes = HOST + ID + LAST, version: bytes = b"1.1") -> bytes:
    return b"GET %s HTTP/%s\r\n%s\r\n" % (path, version, headers)


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedTarget]:
    """Begins when it may."""
    with serve(Script(says=lambda _: "Once", wait_after=0)) as running:
        yield running


@pytest.fixture(scope="module")
def front(
    model: ScriptedTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("refusing")
    flags = ("--read-timeout", "1", "--max-header-kib", "1")
    with gateway(folder, *flags, targets=[model.address]) as process:
        yield process


REFUSED = {
    "no host": (get(b"/version", ID), 400, "bad_http"),
    "two hosts": (get(b"/version", ID + HOST + HOST), 400, "bad_http"),
    "two hosts, as of old": (get(b"/version", ID + HOST + HOST, b"1.0"), 400, "bad_http"),
    "no HTTP": (b"hello\r\n\r\n", 400, "bad_http"),
    "a wrong length": (get(b"/", HOST + ID + b"content-length: x\r\n"), 400, "bad_http"),
    "large headers": (get(b"/", HOST + ID + b"x: " + b"y" * 2000), 431, "headers_too_large"),
    "slow headers": (b"GET / HTTP/1.1\r\n" + ID, 408, None),
    "no such path": (get(b"/nowhere"), 404, "not_found"),
    "no such method": (get(b"/v1/completions"), 405, "method_not_allowed"),
    "no JSON": (post(COMPLETIONS, b"{", (ID + LAST).decode()), 400, None),
    "a strange field": (
        post(COMPLETIONS, b'{"prompt": "a", "odd": 1}', (ID + LAST).decode()),
        400,
        "unknown_parameter",
    ),
}
REASONS = {400: "invalid", 408: "too_slow"}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_json_with_an_id_and_is_counted(front: GatewayProcess, what: str) -> None:
    sent, status, code = REFUSED[what]
    reason = code or REASONS[status]
    sample = f'ssd_gateway_requests_total{{reason="{reason}",status="{status}"}}'
    before = metrics(front).get(sample, 0.0)
    head, _, body = exchange(front, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["code"] == code
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["date"].endswith(" gmt")
    if ID in sent and status != 408:
        assert headers["x-request-id"] == "hen-1"
    assert headers["x-request-id"]
    assert metrics(front)[sample] == before + 1


def test_a_host_is_not_asked_for_where_there_was_none_yet(front: GatewayProcess) -> None:
    assert exchange(front, get(b"/version", b"", b"1.0")).startswith(b"HTTP/1.1 200 ")


SERVED = {
    "whole": (post(COMPLETIONS, ASK), b'"text":"Once"'),
    "events": (post(COMPLETIONS, ASK[:-1] + b', "stream": true}'), b"data: [DONE]"),
    "two": (get(b"/version", HOST) + get(b"/health", HOST), b"HTTP/1.1 200 OK"),
}


@pytest.mark.parametrize("what", SERVED)
def test_who_sends_nothing_more_gets_the_answer(
    model: ScriptedTarget, front: GatewayProcess, what: str
) -> None:
    model.may_go_on.clear()
    # After the end of what is sent was seen.
    threading.Timer(0.5, model.may_go_on.set).start()
    sent, expected = SERVED[what]
    answer = exchange(front, sent, end=True)
    assert expected in answer
    assert answer.count(b"HTTP/1.1 200 OK") == (2 if what == "two" else 1)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_who_leaves_is_not_served(
    model: ScriptedTarget, front: GatewayProcess, stream: bytes, version: bytes
) -> None:
    model.may_go_on.clear()
    ended, asked = model.num_ended, len(model.requests)
    with connect(front) as connection:
        asked_for = post(COMPLETIONS, ASK[:-1] + b', "stream": %s}' % stream)
        connection.sendall(asked_for.replace(b"HTTP/1.1", b"HTTP/" + version))
        wait_until(lambda: len(model.requests) > asked, front.log)
    wait_until(lambda: model.num_ended > ended, front.log)
    model.may_go_on.set()


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (EndpointLostError("10.0.0.7:7410", "failed to connect to ipv4:10.0.0.7:7410"), 503, 1),
        (EndpointLeavingError("10.0.0.7:7410: it drains", 7.0), 503, 7),
        (EndpointFullError("[fd00::10.0.0.7]:7410: 64 requests wait"), 429, 1),
        (DeadlineError("target-10.0.0.7.svc:7410: Deadline Exceeded"), 504, None),
    ],
)
def test_a_target_that_is_gone_leaving_or_full_is_told_without_its_address(
    error: Exception, status: int, retry_after: float | None
) -> None:
    problem = api_error(error)
    assert (problem.status, problem.retry_after) == (status, retry_after)
    assert "10.0.0.7" not in str(problem)
