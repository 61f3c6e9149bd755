"""A gateway that is told to leave: nothing ends in silence, and whoever comes is sent elsewhere."""

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from tests.gateway.scripted_model import ScriptedModel, serving
from tests.processes import GatewayProcess, gateway
from tests.waiting import HANG_SECONDS, wait_until

LONG, SHORT = "60", "0.3"  # seconds of --drain-timeout


@dataclass
class SlowModel(ScriptedModel):
    """Says its first words at once, and the others when it may."""

    may_go_on: threading.Event = field(default_factory=threading.Event)

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        for number, response in enumerate(super().Generate(request, context)):
            if number == 5:
                self.may_go_on.wait(HANG_SECONDS)
            yield response


@pytest.fixture
def model() -> Iterator[SlowModel]:
    with serving(SlowModel(pb.ChatFormat(), lambda _: "Once upon a time.")) as model:
        try:
            yield model
        finally:
            model.may_go_on.set()


def connect(front: GatewayProcess) -> http.client.HTTPConnection:
    host, _, port = front.address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)


def ask(front: GatewayProcess, stream: bool) -> http.client.HTTPConnection:
    connection = connect(front)
    body = json.dumps({"prompt": "Tell", "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def get(front: GatewayProcess, path: str) -> http.client.HTTPResponse:
    connection = connect(front)
    connection.request("GET", path)
    return connection.getresponse()


def events(answer: http.client.HTTPResponse) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]


def is_leaving(error: dict[str, Any]) -> bool:
    return error["error"]["code"] == "leaving" and error["error"]["type"] == "server_error"


def test_what_does_not_end_in_time_ends_with_an_error(model: SlowModel, tmp_path: Path) -> None:
    with gateway(tmp_path, "--drain-timeout", SHORT, targets=[model.address]) as front:
        stream, plain = ask(front, stream=True).getresponse(), ask(front, stream=False)
        stream.readline()
        wait_until(lambda: len(model.requests) == 2, front.log)
        front.terminate()
        error, done = events(stream)[-2:]
        assert done == "[DONE]"
        assert is_leaving(json.loads(error))
        answer = plain.getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-request-id"]
        assert is_leaving(json.load(answer))
        assert front.wait_for_exit() == 0
        assert "Traceback" not in front.log()
        assert "ERROR" not in front.log()


def test_who_comes_while_it_drains_is_sent_elsewhere(model: SlowModel, tmp_path: Path) -> None:
    with gateway(tmp_path, "--drain-timeout", LONG, targets=[model.address]) as front:
        stream = ask(front, stream=True).getresponse()
        stream.readline()
        front.terminate()
        wait_until(lambda: "leaving" in front.log(), front.log)
        ready = get(front, "/ready")
        assert (ready.status, ready.headers["connection"]) == (503, "close")
        assert get(front, "/health").status == 200
        refused = ask(front, stream=True).getresponse()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"] == "1"
        assert is_leaving(json.load(refused))
        model.may_go_on.set()
        assert json.loads(events(stream)[-2])["choices"][0]["finish_reason"] == "stop"
        assert front.wait_for_exit() == 0
        assert not (tmp_path / "port").exists()


def test_a_second_signal_ends_it_at_once(model: SlowModel, tmp_path: Path) -> None:
    with gateway(tmp_path, "--drain-timeout", LONG, targets=[model.address]) as front:
        stream = ask(front, stream=True).getresponse()
        stream.readline()
        front.terminate()
        wait_until(lambda: "leaving" in front.log(), front.log)
        front.terminate()
        assert is_leaving(json.loads(events(stream)[-2]))
        assert front.wait_for_exit() == 0
