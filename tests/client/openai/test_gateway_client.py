"""`ssd-client generate --url`: what a gateway gives is what its target gives."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ssd_client.cli import cli
from ssd_client.connection.security import PLAIN
from ssd_client.errors import EndpointFullError, EndpointLostError
from ssd_client.generate.request import TextPrompt, build_request
from ssd_client.generate.speculation import SpeculationStats
from ssd_client.openai.gateway_client import GatewayClient
from ssd_client.terminal.render import speculation_line
from tests.client.http_server import QuietHandler, serving
from tests.processes import GatewayProcess, TracedPair

SEEDED = ("--seed", "11", "--temperature", "0.9", "--max-tokens", "24")
END = 1  # of sequence, of the model


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["generate", *arguments])


@pytest.mark.parametrize(
    "asked",
    [
        ("Once upon a time", *SEEDED, "--stop", "and", "--mode", "ssd", "--depth", "3"),
        ("--chat", "Tell me a story.", "--system", "Short.", *SEEDED, "--top-logprobs", "2"),
        ("--token-ids", "1,300,301", *SEEDED, "--logprobs", "--logit-bias", "5=-3"),
        ("Once upon a time", *SEEDED, "--choice", "a red fox", "--choice", "a hen", "--logprobs"),
        ("--chat", "Tell me a story.", *SEEDED, "--regex", "[a-z ]{3,20}[.]", "--min-tokens", "0"),
    ],
    ids=["text", "chat", "tokens", "choices", "expression"],
)  # fmt: skip
def test_the_answer_is_the_targets_own(
    asked: tuple[str, ...], gateway: GatewayProcess, traced_pair: TracedPair
) -> None:
    ways = ("--url", gateway.url), ("--target", traced_pair[0].address)
    there, here = (generate(*asked, "--json", *way) for way in ways)
    assert (there.exit_code, here.exit_code) == (0, 0), there.stderr + here.stderr
    contents = [json.loads(each.stdout) for each in (there, here)]
    for each in contents:  # what depends on when and where
        for name in ("timing", "endpoints", "speculation"):
            del each[name]
        del each["usage"]["cached_prompt_tokens"]
        if each["stopped_by"] == END:  # HTTP tells stops that the caller has named
            each["stopped_by"] = None
    assert contents[0] == contents[1]
    assert contents[0]["token_ids"]


def test_it_streams_and_ends_with_the_same_statistics(
    gateway: GatewayProcess, traced_pair: TracedPair
) -> None:
    asked = ("Once upon a time", *SEEDED, "--mode", "off")
    there = generate(*asked, "--url", f"{gateway.url}/v1/")
    here = generate(*asked, "--target", traced_pair[0].address)
    assert there.stdout == here.stdout
    shape = r"24 tokens · first after .* · [\d.]+ tokens/s · length · seed 11\n"
    assert re.fullmatch(shape * 2, here.stderr + there.stderr)
    drawn = ("Once", "--max-tokens", "8", "--url", gateway.url)
    (seed,) = re.findall(r"seed (\d+)", (first := generate(*drawn)).stderr)
    assert generate(*drawn, "--seed", seed).stdout == first.stdout


def test_a_chat_is_held_by_way_of_a_gateway(
    gateway: GatewayProcess, traced_pair: TracedPair
) -> None:
    """With the origins of its tokens, which both ways tell."""
    said = "Tell me a story.\nGo on.\n"
    asked = ["chat", "--seed", "5", "--max-tokens", "12", "--no-history", "--show-origin"]
    asked += ["--mode", "off"]
    ways = ("--url", gateway.url), ("--target", traced_pair[0].address)
    there, here = (CliRunner().invoke(cli, [*asked, *way], input=said) for way in ways)
    assert (there.exit_code, there.stdout) == (0, here.stdout), there.stderr
    assert len(there.stdout) > 40


WRONG_URLS = ("127.0.0.1:8000", "http://", "http://x:port", "http://x/?a=b")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--down-weight", "0.5"), "--down-weight: HTTP has no field for it"),
        (("--retries", "2"), "--retries: not with --url"),
        (("--target", "127.0.0.1:7410"), "--target: not with --url"),
        (("--local",), "--local: not with --url"),
        (("--tls",), "the URL begins with http://"),
        (("--tls", "--tls-server-name", "x"), "--tls-server-name: not with --url"),
        (
            ("--max-tokens", "99999"),
            "This model's maximum context length is 2048 tokens. However, you requested",
        ),
        (("--temperature", "-1"), "temperature"),
        *((("--url", wrong), "is not http://HOST:PORT") for wrong in WRONG_URLS),
    ],
)
def test_what_cannot_be_served_is_named(
    flags: tuple[str, ...], words: str, gateway: GatewayProcess
) -> None:
    done = generate("Once", "--url", gateway.url, "--max-tokens", "4", *flags)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_length_is_needed_where_http_has_another_default(gateway: GatewayProcess) -> None:
    done = generate("Once", "--url", gateway.url)
    assert (done.exit_code, "--max-tokens: name it with --url" in done.stderr) == (2, True)


def test_a_token_does_not_travel_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-some-length")
    asked = ("Once", "--max-tokens", "4", "--url", "http://192.0.2.1:8000")
    done = generate(*asked, "--token-file", str(tmp_path / "token"))
    words = "would travel in the clear to 192.0.2.1:8000"
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
    nobody = generate("Once", "--max-tokens", "4", "--url", "http://127.0.0.1:1")
    assert nobody.exit_code == 1
    assert "127.0.0.1:1: Connection refused" in nobody.stderr


# A gateway that says what it is told to

STATS = {
    "mode": "ssd", "verification": "coupled", "rounds": 4, "hits": 2, "late": 1, "stale": 0,
    "length_misses": 1, "token_misses": 0, "misses": 1, "drafted_tokens": 8, "accepted_tokens": 6,
    "cache_tokens": 6, "fallbacks": {"busy": 1}, "target": "t", "moved": 0,
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
CHUNKS: list[Any] = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [5]}], "usage": USAGE},
    {"choices": [{"index": 0, "text": "b", "token_ids": [6], "finish_reason": "stop",
                  "stop_reason": "c"}], "usage": USAGE},
    {"choices": [], "usage": USAGE, "metrics": {"ssd": STATS}},
]  # fmt: skip


class Scripted(QuietHandler):
    status = 200
    chunks: list[Any]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = b"".join(
            b": ping\n\ndata: %b\n\n" % json.dumps(each).encode() for each in self.chunks
        )
        error = b'{"error": {"message": "no"}}'
        self.answer(self.status, said if self.status == 200 else error, Retry_After="7")


@pytest.fixture
def scripted() -> Iterator[tuple[GatewayClient, type[Scripted]]]:
    script = type("Script", (Scripted,), {"chunks": CHUNKS})
    with serving(script) as url:
        yield GatewayClient(url, PLAIN), script


def told(client: GatewayClient) -> Any:
    request = build_request(TextPrompt("x"), {"max_tokens": 2, "seed": 3})
    with client.send(request) as events:
        for _ in events:
            pass
    return events.result


def test_statistics_are_read_by_their_names(
    scripted: tuple[GatewayClient, type[Scripted]],
) -> None:
    result = told(scripted[0])
    assert (result.text, result.token_ids) == ("ab", [5, 6])
    assert (result.finished.reason.value, result.finished.stopped_by) == ("stop", "c")
    assert result.finished.usage.cached_prompt_tokens == 1
    others = ("misses", "target", "moved")
    ours: Any = {name: value for name, value in STATS.items() if name not in others}
    assert result.speculation == SpeculationStats(**ours)
    assert "hit rate 50 % · acceptance 75 % · 1 late · 1 missed (1 " in speculation_line(result)


def test_what_goes_wrong_at_a_gateway_is_said(
    scripted: tuple[GatewayClient, type[Scripted]],
) -> None:
    client, script = scripted
    script.chunks = CHUNKS[:1]
    with pytest.raises(EndpointLostError, match=r"lost after 1 token .*before its finish"):
        told(client)
    script.chunks = [*CHUNKS[:1], {"error": {"message": "the target is gone"}}]
    with pytest.raises(Exception, match="the target is gone"):
        told(client)
    script.status = 429
    with pytest.raises(EndpointFullError, match="no") as refused:
        told(client)
    assert refused.value.retry_delay_s == 7
