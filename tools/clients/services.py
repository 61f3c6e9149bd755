"""What clients are tried against: the shipped pair, a model with a short context, and a gateway."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssd_client.local.launcher import DEFAULT_DRAFTS, DEFAULT_MODEL, LocalPlan, LocalTarget
from ssd_client.local.service import LocalService

TEMPLATE = Path(__file__).parent / "stories.jinja"
CPU = ("--device", "cpu")
LONG = LocalPlan(
    DEFAULT_MODEL,
    DEFAULT_DRAFTS[DEFAULT_MODEL],
    target_flags=(*CPU, "--chat-template", str(TEMPLATE)),
    draft_flags=CPU,
)
SHORT = LocalPlan(
    DEFAULT_MODEL, target_flags=(*CPU, "--name", "stories-short", "--max-model-len", "256")
)
IDLE_SECONDS = 30.0  # within which what a client has left half way ends


@contextlib.contextmanager
def gateway() -> Iterator[str]:
    """Its address, once it takes requests for both models."""
    with LocalTarget(LONG) as long, LocalTarget(SHORT) as short:
        named = ["--target", long.address, "--target", short.address]
        with LocalService("ssd_gateway", named, name="the gateway") as service:
            url = f"http://{service.address}"
            while not all(each["ready"] for each in targets_of(url)):
                service.check_starting()
                time.sleep(0.1)
            yield url


def targets_of(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/ssd/fleet", timeout=IDLE_SECONDS) as answer:
        targets: list[dict[str, Any]] = json.load(answer)["targets"]
        return targets


def ends_what_was_left(url: str) -> bool:
    """Whether nothing runs any more, soon after a client is gone."""
    end = time.monotonic() + IDLE_SECONDS
    while any(each["running"] + each["waiting"] + each["in_flight"] for each in targets_of(url)):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
