"""Refusals are JSON with the request's id, and are counted; who sends nothing more is answered."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.errors import (
    DeadlineError,
    EndpointFullError,
    EndpointLeavingError,
    EndpointLostError,
)
from ssd_gateway.http.errors import api_error
from tests.gateway.scripted_model import ScriptedModel, serving
from tests.processes import GatewayProcess, gateway
from tests.waiting import HANG_SECONDS, wait_until

HOST = b"host: 127.0.0.1\r\n"
ID = b"x-request-id: hen-1\r\n"
LAST = b"connection: close\r\n"
ASK = json.dumps({"prompt": "Tell"}).encode()


def post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\n%scontent-type: application/json\r\n" % (path, HOST + headers)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def get(path: bytes, headers: bytes = HOST + ID + LAST, version: bytes = b"1.1") -> bytes:
    return b"GET %s HTTP/%s\r\n%s\r\n" % (path, version, headers)


@dataclass
class WaitingModel(ScriptedModel):
    """Begins when it may."""

    may_begin: threading.Event = field(default_factory=threading.Event)
    ended: int = 0  # calls, in whatever way

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        context.add_callback(self._end)
        responses = super().Generate(request, context)
        yield next(responses)
        self.may_begin.wait(HANG_SECONDS)
        yield from responses

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture(scope="module")
def model() -> Iterator[WaitingModel]:
    with serving(WaitingModel(pb.ChatFormat(), lambda _: "Once")) as model:
        try:
            yield model
        finally:
            model.may_begin.set()


@pytest.fixture(scope="module")
def front(
    model: WaitingModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("refusing")
    flags = ("--read-timeout", "1", "--max-header-kib", "1")
    with gateway(folder, *flags, targets=[model.address]) as process:
        yield process


def connect(front: GatewayProcess) -> socket.socket:
    host, _, port = front.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)


def exchange(front: GatewayProcess, sent: bytes, end: bool = False) -> bytes:
    """All that comes back; ``end``: nothing more will be sent."""
    answer = b""
    with connect(front) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        if end:
            connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            answer += data
    return answer


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
    "no JSON": (post(b"/v1/completions", b"{", ID + LAST), 400, None),
    "a strange field": (
        post(b"/v1/completions", b'{"prompt": "a", "odd": 1}', ID + LAST),
        400,
        "unknown_parameter",
    ),
}
REASONS = {400: "invalid", 408: "too_slow"}


def counted(front: GatewayProcess, status: int, reason: str) -> float:
    sample = f'ssd_gateway_requests_total{{reason="{reason}",status="{status}"}}'
    text = exchange(front, get(b"/metrics")).decode()
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_json_with_an_id_and_is_counted(front: GatewayProcess, what: str) -> None:
    sent, status, code = REFUSED[what]
    reason = code or REASONS[status]
    before = counted(front, status, reason)
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
    assert counted(front, status, reason) == before + 1


def test_nothing_after_a_refusal_is_a_request(front: GatewayProcess) -> None:
    good = get(b"/version", HOST)
    answer = exchange(front, good + get(b"/version", b"") + good)
    assert answer.count(b"HTTP/1.1 ") <= 2
    assert answer.count(b'"version"') <= 1


def test_a_host_is_not_asked_for_where_there_was_none_yet(front: GatewayProcess) -> None:
    assert exchange(front, get(b"/version", b"", b"1.0")).startswith(b"HTTP/1.1 200 ")


SERVED = {
    "whole": (post(b"/v1/completions", ASK), b'"text":"Once"'),
    "events": (post(b"/v1/completions", ASK[:-1] + b', "stream": true}'), b"data: [DONE]"),
    "two": (get(b"/version", HOST) + get(b"/health", HOST), b"HTTP/1.1 200 OK"),
}


@pytest.mark.parametrize("what", SERVED)
def test_who_sends_nothing_more_gets_the_answer(
    model: WaitingModel, front: GatewayProcess, what: str
) -> None:
    model.may_begin.clear()
    timer = threading.Timer(0.5, model.may_begin.set)  # after the end of what is sent was seen
    timer.start()
    sent, expected = SERVED[what]
    answer = exchange(front, sent, end=True)
    assert expected in answer
    assert answer.count(b"HTTP/1.1 200 OK") == (2 if what == "two" else 1)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_who_leaves_is_not_served(
    model: WaitingModel, front: GatewayProcess, stream: bytes, version: bytes
) -> None:
    model.may_begin.clear()
    ended, asked = model.ended, len(model.requests)
    with connect(front) as connection:
        asked_for = post(b"/v1/completions", ASK[:-1] + b', "stream": %s}' % stream)
        connection.sendall(asked_for.replace(b"HTTP/1.1", b"HTTP/" + version))
        wait_until(lambda: len(model.requests) > asked, front.log)
    wait_until(lambda: model.ended > ended, front.log)
    model.may_begin.set()


@pytest.mark.parametrize(
    "error",
    [
        EndpointLostError("10.0.0.7:7410", "failed to connect to ipv4:10.0.0.7:7410"),
        EndpointLeavingError("10.0.0.7:7410: it drains", 1.0),
        EndpointFullError("[fd00::10.0.0.7]:7410: 64 requests wait"),
        DeadlineError("target-10.0.0.7.svc:7410: Deadline Exceeded"),
    ],
)
def test_addresses_of_targets_are_not_told(error: Exception) -> None:
    problem = api_error(error)
    assert problem.status in (429, 503, 504)
    assert "10.0.0.7" not in str(problem)
