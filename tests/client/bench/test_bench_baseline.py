"""Another engine beside ours: a real HTTP server that streams OpenAI's completions."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from ssd_client.bench.measure.openai import OpenAIServer, check_baseline
from ssd_client.bench.measure.requests import MeasuredRequest
from ssd_client.bench.measure.settings import Settings
from ssd_client.bench.run import baseline_ask
from ssd_client.errors import BadInputError, ClientError
from tests.client.http_server import QuietHandler, serving

WORDS = ["Once ", "upon ", "a ", "time", "."]
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}
# By the number of tokens that is asked for, what comes after the words.
ENDS = {14: [{"error": {"message": "overloaded"}}], 15: [], 16: [["what"]]}


class OpenAI(QuietHandler):
    asked: list[tuple[str, str | None, dict]]

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        models = {"data": [{"id": "their-model"}]} if known else {}
        self.answer(200 if known else 404, json.dumps(models).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], request))
        if request["max_tokens"] == 13:
            self.answer(400, b'{"error": "unlucky"}')
            return
        self.answer(200, Content_Type="text/event-stream")
        chat = "messages" in request
        words = [{"delta": {"content": word}} if chat else {"text": word} for word in WORDS]
        events = [{"choices": [word]} for word in words]
        for event in [*events, *ENDS.get(request["max_tokens"], [USAGE])]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[str]:
    OpenAI.asked = []
    with serving(OpenAI) as url:
        yield f"openai:{url}/v1"


def measure(server: str, number: int = 0, max_tokens: int = 9, **more: object) -> MeasuredRequest:
    settings = Settings("x", 1, (), max_tokens=max_tokens, seed=3, **more)
    return baseline_ask(OpenAIServer(server), settings)(number, "Hello")


def test_a_baseline_gets_the_same_prompt_and_as_many_tokens(server: str) -> None:
    measured = measure(server, 2, ignore_eos=True, temperature=0.5)
    ((path, _, request),) = OpenAI.asked
    assert path == "/v1/chat/completions"
    expected = {
        "messages": [{"role": "user", "content": "Hello"}],
        "model": "their-model",
        "max_tokens": 9,
        "seed": 5,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
    }
    assert {name: request[name] for name in expected} == expected
    assert (measured.text, measured.error) == ("".join(WORDS), None)
    assert (measured.num_tokens, measured.prompt_tokens) == (9, 7)
    assert len(measured.arrivals) == len(WORDS)
    assert measured.ttft_s < measured.e2el_s


def test_text_prompts_are_plain_completions_and_a_key_goes_along(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert measure(server, chat=False).text == "".join(WORDS)
    ((path, key, request),) = OpenAI.asked
    assert (path, key, request["prompt"]) == ("/v1/completions", "Bearer secret", "Hello")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (13, "HTTP 400.*unlucky"),
        (14, "the server says.*overloaded"),
        (15, "before its finish"),
        (16, "the server says"),
    ],
)
def test_half_an_answer_is_no_answer(server: str, tokens: int, message: str) -> None:
    assert re.search(message, measure(server, max_tokens=tokens).error or "")


def test_what_is_no_server_is_said(server: str) -> None:
    with pytest.raises(BadInputError, match="does the URL end in /v1"):
        OpenAIServer(server.replace("/v1", "/v2"))
    with pytest.raises(ClientError, match="refused"):
        OpenAIServer("openai:http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    "text",
    ["http://x/v1", "openai:x", "openai:ftp://x/v1", "openai:http://", "openai:http://x:y/v1"],
)
def test_only_openai_urls_are_baselines(text: str) -> None:
    with pytest.raises(ValueError, match="is not openai:"):
        check_baseline(text)
