"""Two pairs of real services that are looked at closely, each shared by several tests."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.collector import Collector, collecting
from tests.processes import (
    DraftProcess,
    Output,
    TargetProcess,
    collect,
    draft,
    link_states,
    pb,
    target,
    wait_until_ready,
)
from tests.scale import FULL

METRICS = ("--metrics-listen", "127.0.0.1:0")
PROMPT = "Once upon a time there was a quizzical zebrafinch called Brumblewick"


@dataclass
class Pair:
    target: TargetProcess
    draft: DraftProcess
    collector: Collector | None = None

    def logs(self) -> list[str]:
        return [self.target.log(), self.draft.log()]

    def generate(self, prompt: str = PROMPT, request_id: str = "", max_tokens: int = 24) -> Output:
        stop = pb.StopOptions(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=prompt, request_id=request_id, stop=stop)
        request.sampling.temperature = 0.0
        return collect(self.target.stub().Generate(request, timeout=120))


def start_pair(stack: ExitStack, folder: Path, flags: tuple[str, ...], *own: str) -> Pair:
    """Both load at the same time; returns once they are linked."""
    drafting = stack.enter_context(draft(folder / "draft", *flags, ready=False))
    linked = ("--draft", drafting.address, "--no-auto-off", *own)
    serving = stack.enter_context(target(folder / "target", *flags, *linked))
    wait_until_ready(drafting)
    wait_for_links(serving, "up")
    return Pair(serving, drafting)


def wait_for_links(server: TargetProcess, state: str) -> None:
    deadline = time.monotonic() + 60
    while link_states(server) != [state] and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """JSON at debug level, metrics, and traces to a collector that is here."""
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        flags = (*METRICS, "--log-format", "json", "--log-level", "debug")
        flags += ("--otlp-endpoint", collector.url)
        ranks = ("--tp", "2") if FULL else ()
        pair = start_pair(stack, tmp_path_factory.mktemp("watched"), flags, *ranks)
        pair.collector = collector
        yield pair


@dataclass
class Bereft:
    """What was seen of a pair whose draft is killed half way."""

    output: Output | None = None
    logs: list[str] = field(default_factory=list)
    # Expositions of the target: (seconds, text).
    with_draft: list[tuple[float, str]] = field(default_factory=list)
    without: list[tuple[float, str]] = field(default_factory=list)
    orphan: Output | None = None


@pytest.fixture(scope="session")
def bereft(tmp_path_factory: pytest.TempPathFactory) -> Bereft:
    """Prompts are logged, in lines for people; the collector of its traces is not there."""
    seen = Bereft()
    with ExitStack() as stack:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        flags = (*METRICS, "--log-prompts", "--otlp-endpoint", nobody)
        pair = start_pair(stack, tmp_path_factory.mktemp("bereft"), flags)

        def scrape(kept: list[tuple[float, str]]) -> None:
            kept.append((time.monotonic(), pair.target.exposition()))

        scrape(seen.with_draft)
        seen.output = pair.generate()
        scrape(seen.with_draft)
        seen.logs = pair.logs()
        pair.draft.kill()
        wait_for_links(pair.target, "waiting")
        scrape(seen.without)
        seen.orphan = pair.generate()
        scrape(seen.without)
    return seen


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssd_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
