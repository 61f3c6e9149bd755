"""A stream survives the death of its target without a byte's difference."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.callers import ask, metrics
from tests.processes import GatewayProcess, TargetProcess, gateway, target
from tests.suite.scale import FULL
from tests.waiting import wait_until
from tools.faults.streams import begin, finish

STORY = "Once upon a time there was a lamb who could not sleep."
TOKENS, NUM_SEEDS = (300, 4) if FULL else (128, 1)
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 40}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8, "ignore_eos": True},
    {"logprobs": 2, "top_k": 20, "top_p": 0.9, "ignore_eos": True},
    {"prompt": " ".join([STORY] * 40), "repetition_penalty": 1.1, "ignore_eos": True},
    {"structured_outputs": {"json": SCHEMA}, "logprobs": 1},
]
SAME = {"prompt": STORY, "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
REQUESTS = [{**SAME, "seed": seed, **kind} for seed in range(NUM_SEEDS) for kind in KINDS]
MOVES = "ssd_gateway_moves_total"


@dataclass
class Fleet:
    """Two targets behind a gateway."""

    front: GatewayProcess
    serving: list[TargetProcess]

    def busiest(self) -> TargetProcess:
        told = json.load(ask(self.front, "/ssd/fleet"))["targets"]
        address = max(told, key=lambda each: each["in_flight"])["address"]
        return next(each for each in self.serving if each.address == address)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        serving = [
            stack.enter_context(target(tmp_path / name, "--draft-model", "stories-draft"))
            for name in ("first", "second")
        ]
        addresses = [each.address for each in serving]
        yield Fleet(stack.enter_context(gateway(tmp_path / "front", targets=addresses)), serving)


def test_streams_survive_the_kill_of_a_target_and_without_one_there_is_503(fleet: Fleet) -> None:
    """Most begin alike, those under a grammar among them, and so one target serves all of these."""
    undisturbed = finish(begin(fleet.front.address, REQUESTS))
    assert all(each.done and not each.error for each in undisturbed)
    assert metrics(fleet.front)[MOVES] == 0
    streams = begin(fleet.front.address, REQUESTS)
    wait_until(lambda: all(len(each.heard.token_ids) > 3 for each in streams), fleet.front.log)
    fleet.busiest().kill()
    assert not all(each.heard.done for each in streams)
    assert finish(streams) == undisturbed
    assert metrics(fleet.front)[MOVES] > 0
    for each in fleet.serving:
        each.kill()
    answer = ask(fleet.front, "/v1/completions", {"prompt": STORY})
    assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert json.load(answer)["error"]["type"] == "server_error"
