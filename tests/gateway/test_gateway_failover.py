"""A stream survives the death of its target, and of a draft, without a byte's difference."""

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import (
    GatewayProcess,
    ServiceProcess,
    TargetProcess,
    draft,
    gateway,
    link_states,
    target,
)
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time there was a lamb who could not sleep."
TOKENS = 300 if FULL else 96


def requests() -> list[dict[str, Any]]:
    """Streams of all kinds: several choices, log probabilities, long prompts, samples, grammars."""
    base = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    long = " ".join([STORY] * 40)
    asked = []
    for seed in range(4):
        asked += [
            {**base, "prompt": STORY, "seed": seed, "temperature": 0.8},
            {**base, "prompt": STORY, "seed": seed, "n": 2, "return_token_ids": True},
            {**base, "prompt": STORY, "seed": seed, "logprobs": 2, "top_k": 20, "top_p": 0.9},
            {**base, "prompt": long, "seed": seed, "repetition_penalty": 1.1},
        ]
    schema = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 40}
    held = {"max_tokens": TOKENS, "stream": True, "structured_outputs": {"json": schema}}
    asked += [{**held, "prompt": STORY, "seed": seed, "logprobs": 1} for seed in range(2)]
    return asked


class Stream(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, gateway: GatewayProcess, content: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._gateway, self._content = gateway, content
        self.chunks: list[dict[str, Any]] = []
        self.done = False

    def run(self) -> None:
        host, _, port = self._gateway.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
        body = json.dumps(self._content)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                self.chunks.append(json.loads(line[6:]))

    def said(self) -> dict[int, dict[str, Any]]:
        """What each choice has said, however it was cut into chunks."""
        choices: dict[int, dict[str, Any]] = {}
        for chunk in self.chunks:
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                said = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
                said["text"] += choice["text"]
                said["ids"] += choice.get("token_ids", [])
                said["finish"] = choice["finish_reason"]
                if choice["logprobs"] is not None:
                    told = choice["logprobs"]
                    said["logprobs"] += zip(
                        told["tokens"],
                        told["token_logprobs"],
                        told["top_logprobs"],
                        told["text_offset"],
                        strict=True,
                    )
        return choices


def begin(gateway: GatewayProcess) -> list[Stream]:
    streams = [Stream(gateway, content) for content in requests()]
    for stream in streams:
        stream.start()
    return streams


def finish(streams: list[Stream]) -> list[dict[int, dict[str, Any]]]:
    for stream in streams:
        stream.join(HANG_SECONDS)
        assert stream.done
    return [stream.said() for stream in streams]


@dataclass
class Fleet:
    """Two targets with one draft, behind a gateway."""

    front: GatewayProcess
    serving: list[TargetProcess]
    drafting: ServiceProcess

    def read(self, path: str) -> str:
        host, _, port = self.front.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def busiest(self) -> TargetProcess:
        told = json.loads(self.read("/ssd/fleet"))["targets"]
        address = max(told, key=lambda each: each["in_flight"])["address"]
        return next(each for each in self.serving if each.address == address)

    def num_moves(self) -> float:
        lines = self.read("/metrics").splitlines()
        (told,) = (line for line in lines if line.startswith("ssd_gateway_moves_total "))
        return float(told.split()[1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Each test kills one of it, and leaves enough to the others."""
    tmp_path = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        drafting = stack.enter_context(draft(tmp_path / "draft"))
        flags = ("--draft", drafting.address, "--draft-model", "stories-draft")
        serving = [
            stack.enter_context(target(tmp_path / name, *flags)) for name in ("first", "second")
        ]
        addresses = [each.address for each in serving]
        front = stack.enter_context(gateway(tmp_path / "gateway", targets=addresses))
        for each in serving:
            wait_until(lambda each=each: link_states(each) == ["up"], each.log)
        yield Fleet(front, serving, drafting)


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[dict[int, dict[str, Any]]]:
    said = finish(begin(fleet.front))
    assert fleet.num_moves() == 0
    return said


def test_eighteen_streams_survive_the_kill_of_a_target(
    fleet: Fleet, undisturbed: list[dict[int, dict[str, Any]]]
) -> None:
    """Most begin alike, those under a grammar among them, and so one target serves all of these."""
    before = fleet.num_moves()
    streams = begin(fleet.front)
    wait_until(lambda: all(len(each.chunks) > 3 for each in streams), fleet.front.log)
    fleet.busiest().process.send_signal(signal.SIGKILL)
    assert not all(each.done for each in streams[-2:])
    assert finish(streams) == undisturbed
    assert fleet.num_moves() > before


def test_eighteen_streams_survive_the_kill_of_a_draft(
    fleet: Fleet, undisturbed: list[dict[int, dict[str, Any]]]
) -> None:
    before = fleet.num_moves()
    streams = begin(fleet.front)
    wait_until(lambda: all(len(each.chunks) > 3 for each in streams), fleet.front.log)
    fleet.drafting.kill()
    assert finish(streams) == undisturbed
    assert fleet.num_moves() == before


def test_without_a_target_the_answer_is_503(tmp_path: Path) -> None:
    with gateway(tmp_path, targets=["127.0.0.1:1"], ready=False) as front:
        host, _, port = front.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HANG_SECONDS)
        body = json.dumps({"prompt": STORY})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert json.load(answer)["error"]["type"] == "server_error"
