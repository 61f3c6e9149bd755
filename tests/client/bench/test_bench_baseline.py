"""Another engine beside ours: a real HTTP server that streams OpenAI's completions."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest

from ssd_client.bench.measure.openai import OpenAIServer, check_baseline
from ssd_client.bench.measure.settings import Settings
from ssd_client.bench.run import baseline_ask
from ssd_client.errors import BadInputError, ClientError

WORDS = ["Once ", "upon ", "a ", "time", "."]


class OpenAI(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict]]
    keys: list[str | None]

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._send(200 if known else 404, {"data": [{"id": "their-model"}]} if known else {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append((self.path, request))
        type(self).keys.append(self.headers["Authorization"])
        if request.get("max_tokens") == 13:
            self._send(400, {"error": "unlucky"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for word in WORDS:
            chat = "messages" in request
            choice = {"delta": {"content": word}} if chat else {"text": word}
            self._event({"choices": [choice]})
            time.sleep(0.002)
        broken = {14: {"error": {"message": "overloaded"}}, 16: ["what"]}
        if request["max_tokens"] in broken:
            self._event(broken[request["max_tokens"]])
        if request["max_tokens"] < 13:
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: object) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[str]:
    OpenAI.asked, OpenAI.keys = [], []
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"openai:http://127.0.0.1:{found.server_address[1]}/v1"
    found.shutdown()


def settings(**more: object) -> Settings:
    return Settings(data="x", num_prompts=1, modes=(), max_tokens=9, seed=3, **more)


def test_a_baseline_gets_the_same_prompt_and_as_many_tokens(server: str) -> None:
    measured = baseline_ask(OpenAIServer(server), settings(ignore_eos=True, temperature=0.5))(
        2, "Hello"
    )
    ((path, request),) = OpenAI.asked
    assert path == "/v1/chat/completions"
    assert request["messages"] == [{"role": "user", "content": "Hello"}]
    assert (request["max_tokens"], request["seed"], request["temperature"]) == (9, 5, 0.5)
    assert (request["ignore_eos"], request["stream"], request["model"]) == (
        True,
        True,
        "their-model",
    )
    assert measured.text == "".join(WORDS)
    assert (measured.num_tokens, measured.prompt_tokens, measured.error) == (9, 7, None)
    assert len(measured.arrivals) == len(WORDS)
    assert measured.ttft_s is not None
    assert measured.tpot_s is not None
    assert measured.ttft_s < measured.e2el_s


def test_text_prompts_are_plain_completions(server: str) -> None:
    measured = baseline_ask(OpenAIServer(server), settings(chat=False))(0, "Once")
    assert [(path, request["prompt"]) for path, request in OpenAI.asked] == [
        ("/v1/completions", "Once")
    ]
    assert measured.text == "".join(WORDS)


def test_what_goes_wrong_there_is_said(server: str) -> None:
    refused = baseline_ask(OpenAIServer(server), Settings("x", 1, (), max_tokens=13))(0, "Hello")
    assert refused.error is not None
    assert "HTTP 400" in refused.error
    assert "unlucky" in refused.error
    with pytest.raises(BadInputError, match="does the URL end in /v1"):
        OpenAIServer(server.replace("/v1", "/v2"))
    with pytest.raises(ClientError, match="refused"):
        OpenAIServer("openai:http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(14, "the server says.*overloaded"), (15, "before its finish"), (16, "the server says")],
)
def test_half_an_answer_is_no_answer(server: str, tokens: int, message: str) -> None:
    ask = baseline_ask(OpenAIServer(server), Settings("x", 1, (), max_tokens=tokens))
    error = ask(0, "Hello").error
    assert error is not None
    assert re.search(message, error)


def test_the_key_of_the_environment_goes_along(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    baseline_ask(OpenAIServer(server), settings())(0, "Hello")
    assert OpenAI.keys[-1] == "Bearer secret"


@pytest.mark.parametrize(
    "text",
    ["http://x/v1", "openai:x", "openai:ftp://x/v1", "openai:http://", "openai:http://x:y/v1"],
)
def test_only_openai_urls_are_baselines(text: str) -> None:
    with pytest.raises(ValueError, match="is not openai:"):
        check_baseline(text)
