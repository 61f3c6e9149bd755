"""Attacks on a gateway in front of a target."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.attack.callers import OTHERS_PROMPTS, others_prompt
from tools.attack.scenes import PROBES, seconds_until, started
from tools.attack.watch import Row, Watch, attacker, num_files
from tools.soak.services import Service


class GatewayService(Service):
    def is_ready(self) -> bool:
        return is_alive(self.address, "/ready")

    def processes(self) -> dict[str, int]:
        """The gateway, and what reads large bodies for it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        readers = {f"reader {number}": int(child) for number, child in enumerate(children)}
        return {"gateway": pid, **readers}


def is_alive(address: str, path: str = "/health") -> bool:
    """As a probe asks: on a connection of its own."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def others_first_token(address: str) -> Callable[[int], float]:
    """Return what asks on a connection that is kept, and gives the milliseconds."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)

    def ask(number: int) -> float:
        fields = {"prompt": others_prompt(number), "max_tokens": 8, "seed": number}
        body = json.dumps({**fields, "stream": True, "ignore_eos": True})
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        line = answer.readline()
        first = time.monotonic() - begin
        if not line.startswith(b"data: {"):
            raise SystemExit(f"others were not served: {answer.status} {line!r}")
        answer.read()
        return 1e3 * first

    return ask


def read_large_body(address: str) -> None:
    """So that the process for them is there; no target takes this one."""
    body = json.dumps({"prompt": "hen " * 50_000}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/completions", body, {"content-type": "application/json"}
    )
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=60)


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[GatewayService]:
    target = Service("target", "ssd_target", ["stories-target"], folder)
    with started(target):
        front = GatewayService("gateway", "ssd_gateway", ["--target", target.address], folder)
        with started(front):
            yield front


def on_gateway(name: str, files: int = 0) -> Callable[[Path], Row]:
    """``files``: descriptors that the gateway has once the attack is under way."""

    def lead(folder: Path) -> Row:
        with gateway(folder) as front:
            ask = others_first_token(front.address)
            for number in range(OTHERS_PROMPTS):  # each is cached from now on
                ask(number)
            read_large_body(front.address)
            answered: list[bool] = []

            @contextlib.contextmanager
            def probed() -> Iterator[None]:
                with attacker(name, front.address):
                    seconds_until(lambda: num_files(front.process.pid) >= files)
                    yield
                    answered.extend(is_alive(front.address) for _ in range(PROBES))

            row = Watch(front, ask).row(f"{name}, gateway", probed())
        row.note = f"{sum(answered)} of {PROBES} probes answered"
        if not all(answered):
            row.problems.append("probes were refused")
        return row

    return lead
