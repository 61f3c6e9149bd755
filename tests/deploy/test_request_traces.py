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
WITHOUT_EXTRA = "import sys; sys.modules['opentelemetry'] = None; from {0}.cli import main; main()"


def of_trace(spans: list[Received], trace: str) -> dict[str, Received]:
    return {each.service: each for each in spans if each.trace == trace}


def trace_of(spans: list[Received], request_id: str) -> str:
    found = [each.trace for each in spans if each.about.get("ssd.request_id") == request_id]
    return found[0] if found else ""


def test_one_trace_goes_from_client_through_target_to_draft(watched: Pair) -> None:
    assert watched.collector is not None
    done = run_client(
        *("generate", PROMPT, "--target", watched.target.address, "--request-id", "traced-1"),
        *("--max-tokens", "64", "--ignore-eos", "--otlp-endpoint", watched.collector.url),
    )
    assert done.returncode == 0, done.stderr

    def is_whole(spans: list[Received]) -> bool:
        return of_trace(spans, trace_of(spans, "traced-1")).keys() == SERVICES

    spans = watched.collector.wait_for(is_whole)
    found = of_trace(spans, trace_of(spans, "traced-1"))
    client, target, draft = (found[f"ssd-{name}"] for name in ("client", "target", "draft"))
    assert client.parent == ""
    assert target.parent == client.span
    assert draft.parent == target.span
    assert target.events == ("queued", "prefill", "first token", "finish")
    assert target.about["ssd.completion_tokens"] == 64 == client.about["ssd.completion_tokens"]
    assert target.about["ssd.prompt_tokens"] == draft.about["ssd.prompt_tokens"] > 0
    assert 0 <= target.about["ssd.hit_rate"] <= 1
    assert target.about["ssd.accepted_tokens"] <= target.about["ssd.draft_tokens"]
    assert draft.about["ssd.sequence"] == target.about["ssd.sequence"]
    assert draft.about["ssd.rounds"] > 1
    assert draft.about["ssd.branch_tokens"] > 0
    assert "first branches" in draft.events
    assert not any(each.failed for each in found.values())
    assert "Brumblewick" not in repr(spans)
    assert done.stdout.strip()[:30] not in repr(spans)


def call(pair: Pair, request: pb.GenerateRequest, traceparent: str) -> None:
    metadata = (("traceparent", traceparent),)
    list(pair.target.stub().Generate(request, timeout=HANG_SECONDS, metadata=metadata))


def test_a_refused_request_has_a_span_that_says_so(watched: Pair) -> None:
    assert watched.collector is not None
    with pytest.raises(grpc.RpcError):
        call(watched, pb.GenerateRequest(text="", request_id="refused-1"), FOREIGN.format(1))
    spans = watched.collector.wait_for(lambda spans: bool(trace_of(spans, "refused-1")))
    (span,) = (each for each in spans if each.about.get("ssd.request_id") == "refused-1")
    assert (span.trace, span.parent) == tuple(FOREIGN.split("-")[1:3])
    assert span.failed
    assert span.about["ssd.outcome"] == "refused"


def test_who_is_not_sampled_or_speaks_nonsense_is_served_all_the_same(watched: Pair) -> None:
    assert watched.collector is not None
    stop = pb.StopOptions(max_tokens=3)
    for name, context in (("unsampled", FOREIGN.format(0)), ("nonsense", "00-zz-~" * 40)):
        call(watched, pb.GenerateRequest(text="Once", request_id=name, stop=stop), context)
    spans = watched.collector.wait_for(lambda spans: bool(trace_of(spans, "nonsense")))
    assert trace_of(spans, "unsampled") == ""
    assert trace_of(spans, "nonsense") not in ("", FOREIGN.split("-")[1])


def test_a_collector_that_is_not_there_harms_nobody(watched: Pair, bereft: Bereft) -> None:
    assert bereft.output is not None
    assert len(bereft.output.tokens) == 64
    done = run_client(
        *("generate", "Once", "--target", watched.target.address, "--max-tokens", "4"),
        *("--ignore-eos", "--otlp-endpoint", "http://127.0.0.1:9"),
    )
    assert done.returncode == 0, done.stderr
    assert "4 tokens" in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("ssd_target", ("serve", "stories-draft", "--check-config")),
        ("ssd_client", ("generate", "Once")),
    ],
)
def test_without_the_extra_the_flag_names_it(package: str, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRA.format(package), *arguments]
    traced = [*command, "--otlp-endpoint", "http://127.0.0.1:4317"]
    done = subprocess.run(traced, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == f"error: {NEEDS_EXTRA}"


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    code = """
import sys
from ssd_client.cli import cli
from ssd_draft.front.server import DraftServer
from ssd_target.front.server import TargetServer
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_SECONDS).returncode == 0


def test_an_address_that_is_no_url_is_named(watched: Pair) -> None:
    done = run_client("generate", "Once", "--otlp-endpoint", "127.0.0.1:4317")
    assert done.returncode == 2
    assert "--otlp-endpoint: http://HOST:PORT or https://HOST:PORT is needed" in done.stderr
