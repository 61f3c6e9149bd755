"""One trace from client through target to draft, at a real OpenTelemetry collector."""

import subprocess
import sys

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from tests.deploy.collector import Received
from tests.deploy.watched import PROMPT, Bereft, Pair, run_client
from tests.waiting import HANG_SECONDS

SERVICES = {"ssd-client", "ssd-target", "ssd-draft"}
FOREIGN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{}"
NEEDS_EXTRA = '--otlp-endpoint needs the otel extra: pip install "ssd-serve[otel]"'


def of_trace(spans: list[Received], trace: str) -> dict[str, Received]:
    return {each.service: each for each in spans if each.trace == trace}


def trace_of(spans: list[Received], request_id: str) -> str:
    found = [each.trace for each in spans if each.about.get("ssd.request_id") == request_id]
    return found[0] if found else ""


def test_one_trace_goes_from_client_through_target_to_draft(watched: Pair) -> None:
    done = run_client(
        *("generate", PROMPT, "--target", watched.target.address, "--request-id", "traced-1"),
        *("--max-tokens", "64", "--ignore-eos", "--otlp-endpoint", watched.traces_to),
    )
    assert done.returncode == 0, done.stderr

    def is_whole(spans: list[Received]) -> bool:
        return of_trace(spans, trace_of(spans, "traced-1")).keys() == SERVICES

    spans = watched.spans(is_whole)
    found = of_trace(spans, trace_of(spans, "traced-1"))
    client, target, draft = (found[f"ssd-{name}"] for name in ("client", "target", "draft"))
    assert client.parent == ""
    assert target.parent == client.span
    assert draft.parent == target.span
    assert target.events == ("queued", "prefill", "first token", "finish")
    said = target.about
    assert said["ssd.completion_tokens"] == 64 == client.about["ssd.completion_tokens"]
    assert said["ssd.prompt_tokens"] == draft.about["ssd.prompt_tokens"] > 0
    assert 0 <= said["ssd.hit_rate"] <= 1
    assert said["ssd.accepted_tokens"] <= said["ssd.draft_tokens"]
    assert draft.about["ssd.sequence"] == said["ssd.sequence"]
    assert min(draft.about["ssd.rounds"] - 1, draft.about["ssd.branch_tokens"]) > 0
    assert "first branches" in draft.events
    assert not any(each.failed for each in found.values())
    assert "Brumblewick" not in repr(spans)
    assert done.stdout.strip()[:30] not in repr(spans)


def call(pair: Pair, request: pb.GenerateRequest, traceparent: str) -> None:
    metadata = (("traceparent", traceparent),)
    list(pair.target.stub().Generate(request, timeout=HANG_SECONDS, metadata=metadata))


def test_a_refused_request_has_a_span_that_says_so(watched: Pair) -> None:
    with pytest.raises(grpc.RpcError):
        call(watched, pb.GenerateRequest(text="", request_id="refused-1"), FOREIGN.format(1))
    spans = watched.spans(lambda spans: bool(trace_of(spans, "refused-1")))
    (span,) = (each for each in spans if each.about.get("ssd.request_id") == "refused-1")
    assert (span.trace, span.parent) == tuple(FOREIGN.split("-")[1:3])
    assert (span.failed, span.about["ssd.outcome"]) == (True, "refused")


def test_who_is_not_sampled_or_speaks_nonsense_is_served_all_the_same(watched: Pair) -> None:
    stop = pb.StopOptions(max_tokens=3)
    for name, context in (("unsampled", FOREIGN.format(0)), ("nonsense", "00-zz-~" * 40)):
        call(watched, pb.GenerateRequest(text="Once", request_id=name, stop=stop), context)
    spans = watched.spans(lambda spans: bool(trace_of(spans, "nonsense")))
    assert trace_of(spans, "unsampled") == ""
    assert trace_of(spans, "nonsense") not in ("", FOREIGN.split("-")[1])


def test_a_collector_that_is_not_there_harms_nobody(watched: Pair, bereft: Bereft) -> None:
    assert len(bereft.output.tokens) == 64
    done = run_client(
        *("generate", "Once", "--target", watched.target.address, "--max-tokens", "4"),
        *("--ignore-eos", "--otlp-endpoint", "http://127.0.0.1:9"),
    )
    assert (done.returncode, "4 tokens" in done.stderr) == (0, True), done.stderr


BESIDE = """
import sys
from ssd_client.cli import cli
from ssd_draft.front.server import DraftServer
from ssd_target.front.server import TargetServer
assert not any(name.startswith("opentelemetry") for name in sys.modules)
sys.modules["opentelemetry"] = None
sys.argv[1:] = {1!r}
from {0}.cli import main
main()
"""


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("ssd_target", ["serve", "stories-draft", "--check-config"]),
        ("ssd_client", ["generate", "Once"]),
    ],
)
def test_without_the_extra_the_flag_names_it_and_nothing_else_imports_it(
    package: str, arguments: list[str]
) -> None:
    code = BESIDE.format(package, [*arguments, "--otlp-endpoint", "http://127.0.0.1:4317"])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == f"error: {NEEDS_EXTRA}"


def test_an_address_that_is_no_url_is_named() -> None:
    done = run_client("generate", "Once", "--otlp-endpoint", "127.0.0.1:4317")
    assert done.returncode == 2
    assert "--otlp-endpoint: http://HOST:PORT or https://HOST:PORT is needed" in done.stderr
