"""A gateway that is told to leave: nothing ends in silence, and whoever comes is sent elsewhere."""

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted_target import Script, ScriptedTarget, serve
from tests.gateway.callers import ask
from tests.processes import GatewayProcess, gateway
from tests.waiting import wait_until

LONG, SHORT = "60", "0.3"  # seconds of --drain-timeout


@pytest.fixture
def model() -> Iterator[ScriptedTarget]:
    """Says its first words at once, and the others when it may."""
    with serve(Script(says=lambda _: "Once upon a time.", wait_after=4)) as running:
        yield running


def begun(front: GatewayProcess) -> http.client.HTTPResponse:
    """A stream whose first words are there."""
    stream = ask(front, "/v1/completions", {"prompt": "Tell", "stream": True})
    stream.readline()
    return stream


def leave(front: GatewayProcess) -> None:
    front.terminate()
    wait_until(lambda: "leaving" in front.log(), front.log)


def events(answer: http.client.HTTPResponse) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]


def is_leaving(error: dict[str, Any]) -> bool:
    return error["error"]["code"] == "leaving" and error["error"]["type"] == "server_error"


def test_what_does_not_end_in_time_ends_with_an_error(
    model: ScriptedTarget, tmp_path: Path
) -> None:
    with (
        gateway(tmp_path, "--drain-timeout", SHORT, targets=[model.address]) as front,
        ThreadPoolExecutor() as pool,
    ):
        stream, plain = begun(front), pool.submit(ask, front, "/v1/completions", {"prompt": "Tell"})
        wait_until(lambda: len(model.requests) == 2, front.log)
        leave(front)
        error, done = events(stream)[-2:]
        assert done == "[DONE]"
        assert is_leaving(json.loads(error))
        answer = plain.result()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["x-request-id"]
        assert is_leaving(json.load(answer))
        assert front.wait_for_exit() == 0
        assert not re.search("Traceback|ERROR", front.log())


def test_who_comes_while_it_drains_is_sent_elsewhere(model: ScriptedTarget, tmp_path: Path) -> None:
    with gateway(tmp_path, "--drain-timeout", LONG, targets=[model.address]) as front:
        stream = begun(front)
        leave(front)
        ready, refused = ask(front, "/ready"), ask(front, "/v1/completions", {"prompt": "Tell"})
        for answer in (ready, refused):
            assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert ask(front, "/health").status == 200
        assert refused.headers["retry-after"] == "1"
        assert is_leaving(json.load(refused))
        model.may_go_on.set()
        assert json.loads(events(stream)[-2])["choices"][0]["finish_reason"] == "stop"
        assert front.wait_for_exit() == 0
        assert not (tmp_path / "port").exists()


def test_a_second_signal_ends_it_at_once(model: ScriptedTarget, tmp_path: Path) -> None:
    with gateway(tmp_path, "--drain-timeout", LONG, targets=[model.address]) as front:
        stream = begun(front)
        leave(front)
        front.terminate()
        assert is_leaving(json.loads(events(stream)[-2]))
        assert front.wait_for_exit() == 0
