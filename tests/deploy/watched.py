"""Pairs of real services that are looked at closely."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ssd.v1 import target_pb2 as pb
from tests.deploy.collector import Collector, Received
from tests.processes import (
    PATIENT,
    DraftProcess,
    GatewayProcess,
    Output,
    TargetProcess,
    collect,
    draft,
    link_states,
    target,
    wait_until_ready,
)
from tests.waiting import HANG_SECONDS, wait_until

PROMPT = "Once upon a time there was a quizzical zebrafinch called Brumblewick"


@dataclass
class Pair:
    target: TargetProcess
    draft: DraftProcess
    gateway: GatewayProcess | None = None
    collector: Collector | None = None

    @property
    def traces_to(self) -> str:
        assert self.collector is not None
        return self.collector.url

    def spans(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        assert self.collector is not None
        return self.collector.wait_for(enough)

    def logs(self) -> list[str]:
        return [self.target.log(), self.draft.log()]

    def complete(self, max_tokens: int = 8) -> None:
        """A request by way of the gateway."""
        assert self.gateway is not None
        body = json.dumps({"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0})
        headers = {"Content-Type": "application/json"}
        url = f"{self.gateway.url}/v1/completions"
        request = urllib.request.Request(url, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            assert json.load(answer)["choices"][0]["text"]

    def generate(self, prompt: str = PROMPT, request_id: str = "", max_tokens: int = 64) -> Output:
        stop = pb.StopOptions(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=prompt, request_id=request_id, stop=stop)
        request.sampling.temperature = 0.0
        return collect(self.target.stub().Generate(request, timeout=HANG_SECONDS))


def start_pair(stack: ExitStack, folder: Path, flags: tuple[str, ...], *own: str) -> Pair:
    """Both load at the same time; returns once they are linked."""
    drafting = stack.enter_context(draft(folder / "draft", *flags, ready=False))
    linked = ("--draft", drafting.address, *PATIENT, *own)
    serving = stack.enter_context(target(folder / "target", *flags, *linked))
    wait_until_ready(drafting)
    wait_for_links(serving, "up")
    return Pair(serving, drafting)


def wait_for_links(server: TargetProcess, state: str) -> None:
    wait_until(lambda: link_states(server) == [state], server.log)


@dataclass
class Bereft:
    """What was seen of a pair whose draft is killed half way."""

    output: Output
    logs: list[str]
    # The target's metrics before and after each of two generations.
    with_draft: list[dict[str, float]]
    without: list[dict[str, float]]
    orphan: Output


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssd_client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
