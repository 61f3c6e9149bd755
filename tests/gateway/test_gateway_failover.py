"""A stream survives the death of its target, and of a draft, without a byte's difference."""

import http.client
import json
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.processes import GatewayProcess, draft, gateway, link_states, target
from tests.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time there was a lamb who could not sleep."
TOKENS = 300 if FULL else 48


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


@pytest.mark.parametrize("killed", ["target", "draft"])
def test_eighteen_streams_survive_a_kill(tmp_path: Path, killed: str) -> None:
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
        undisturbed = finish(begin(front))

        streams = begin(front)
        wait_until(lambda: all(len(each.chunks) > 3 for each in streams), front.log)
        if killed == "target":
            serving[0].process.send_signal(signal.SIGKILL)
        else:
            drafting.kill()
        assert finish(streams) == undisturbed


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
