"""How a gateway starts, and bounds its callers."""

import http.client
import json
import select
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from tests.processes import GatewayProcess, TracedPair, gateway
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time there was a goat."


def begin(front: GatewayProcess, **more: Any) -> http.client.HTTPResponse:
    host, _, port = front.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
    content = {"prompt": STORY, "seed": 5, "stream": True, "ignore_eos": True, **more}
    body = json.dumps(content)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection.getresponse()


def in_flight(pair: TracedPair) -> int:
    info = pair[0].stub().GetModelInfo(pb.GetModelInfoRequest())
    return int(info.load.running + info.load.waiting)


def test_a_reader_that_takes_nothing_is_cut(traced_pair: TracedPair, tmp_path: Path) -> None:
    with gateway(tmp_path, "--write-timeout", "1", targets=[traced_pair[0].address]) as front:
        host, _, port = front.address.rpartition(":")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            # Log probabilities make long chunks: what a socket holds is soon full.
            content = {"prompt": [STORY] * 8, "max_tokens": 1900, "logprobs": 20}
            body = json.dumps({**content, "stream": True, "ignore_eos": True}).encode()
            reader.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: "a stream was cut" in front.log(), front.log)
            wait_until(lambda: in_flight(traced_pair) == 0, front.log)
            wait_until(lambda: is_reset(reader), front.log)
            assert "ERROR" not in front.log()


def test_a_reader_that_takes_no_whole_answer_is_cut(
    traced_pair: TracedPair, tmp_path: Path
) -> None:
    with gateway(tmp_path, "--write-timeout", "1", targets=[traced_pair[0].address]) as front:
        host, _, port = front.address.rpartition(":")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            asked = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            while not is_reset(reader):  # as many answers as it takes to fill what sockets hold
                with suppress(ConnectionError, BlockingIOError):
                    reader.send(asked, socket.MSG_DONTWAIT)


def is_reset(connection: socket.socket) -> bool:
    """Whether its end is known, before anything is read of what has come."""
    events = select.poll()
    events.register(connection, select.POLLHUP)
    return bool(events.poll(50))


def test_metrics_tell_what_was_served(gateway: GatewayProcess) -> None:
    def read() -> dict[str, float]:
        host, _, port = gateway.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
        return {name: float(value) for name, value in pairs}

    def served(figures: dict[str, float]) -> float:
        name = "ssd_gateway_requests_total"
        return sum(n for key, n in figures.items() if name in key and 'status="200"' in key)

    before = read()
    begin(gateway, max_tokens=7).read()

    def counted() -> bool:
        now = read()
        return (
            served(now) == served(before) + 1
            and now["ssd_gateway_tokens_total"] == before["ssd_gateway_tokens_total"] + 7
            and now["ssd_gateway_targets_ready"] == 1
        )

    wait_until(counted, gateway.log)


def test_the_api_is_described(gateway: GatewayProcess) -> None:
    host, _, port = gateway.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
    connection.request("GET", "/openapi.json")
    described = json.load(connection.getresponse())
    assert described["openapi"].startswith("3.1")
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "speculation", "return_token_ids"} <= fields.keys()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--target"),
        (["--target", "nowhere"], "--target"),
        (["--target", "h:1", "--listen", "0.0.0.0:8000"], "--listen"),
        (["--target", "h:1", "--tls-cert", "a.crt"], "--tls-key"),
        (["--target", "h:1", "--max-body-mib", "0"], "--max-body-mib"),
        (["--target", "h:1", "--cors-origin", "app"], "--cors-origin"),
        (["--target", "h:1", "--token-file", "/nowhere.toml"], "--token-file"),
    ],
)
def test_a_wrong_option_is_named(flags: list[str], named: str) -> None:
    command = [sys.executable, "-m", "ssd_gateway", "serve", "--check-config", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert "Traceback" not in done.stderr
