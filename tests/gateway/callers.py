"""Callers of a gateway: by a socket, by HTTP, and by the openai SDK."""

import http.client
import json
import socket
from contextlib import suppress
from typing import Any

import openai

from ssd.v1 import target_pb2 as pb
from tests.processes import GatewayProcess, TargetProcess
from tests.waiting import HANG_SECONDS


def connect(front: GatewayProcess, host: str = "") -> socket.socket:
    """From the host that is named."""
    name, _, port = front.address.rpartition(":")
    return socket.create_connection((name, int(port)), HANG_SECONDS, (host, 0))


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """A request as it is sent."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def exchange(front: GatewayProcess, *pieces: bytes, end: bool = False) -> bytes:
    """All that comes back; ``end``: nothing more will be sent."""
    answer = b""
    with connect(front) as connection, suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
        if end:
            connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(65536):
            answer += data
    return answer


def ask(
    front: GatewayProcess, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """GET, or with a body POST."""
    host, _, port = front.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
    content = None if body is None else json.dumps(body)
    told = {"content-type": "application/json", **(headers or {})}
    connection.request("GET" if body is None else "POST", path, content, told)
    return connection.getresponse()


def metrics(front: GatewayProcess) -> dict[str, float]:
    """Samples by name and labels."""
    lines = ask(front, "/metrics").read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def in_flight(target: TargetProcess) -> int:
    """Sequences that run there, or wait."""
    load = target.stub().GetModelInfo(pb.GetModelInfoRequest()).load
    return int(load.running + load.waiting)


def sdk_of(front: GatewayProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)
