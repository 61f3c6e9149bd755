"""Two targets and two drafts are restarted one after another under sixteen streams.

No request is lost and no text is changed; the drafts are found by a file, and one of them comes
back elsewhere. Half of the requests are resumptions of earlier ones, which no server has seen.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client.connection.endpoints import Endpoint, connect
from ssd_client.connection.failover import RetryPolicy
from ssd_client.generate.events import Finished, Moved, Tokens
from ssd_client.generate.request import pack_token_ids
from ssd_client.generate.stream import generate
from tests.processes import (
    TargetProcess,
    draft,
    target,
    wait_until_idle,
    wait_until_ready,
)
from tests.speculation.generations import (
    METRICS,
    OFF,
    WAITS_2_SECONDS,
    is_empty,
    request,
    with_speculation,
)
from tests.waiting import wait_until

STREAMS = 16
ROUNDS = 3  # in which all four are restarted
TOKENS = 150
TARGET = (*METRICS, "--threads", "1", *WAITS_2_SECONDS, "--discover-seconds", "0.5")
# What runs on the first is cut and goes on elsewhere; on the second it may be finished.
DRAIN_SECONDS = ("0", "20")
DRAFT = (*METRICS, "--threads", "1")
# A stream may find both targets away: one drains, the other is not back yet in its eyes.
RETRIES = RetryPolicy(retries=100, lost_wait_s=0.1, lost_wait_max_s=1.0, leaving_tries=100)
CALL_SECONDS = 1800.0  # only a hang takes so long


class Restarted:
    """A service that ends in order and starts again, on its port or on another one."""

    def __init__(self, start: Any, directory: Path, *flags: str) -> None:
        self._start, self._directory, self._flags = start, directory, flags
        self._stack = ExitStack()
        self.process = self._enter(*flags)

    def _enter(self, *flags: str) -> Any:
        # What serves gives way to what starts: the machine is small.
        return self._stack.enter_context(self._start(self._directory, *flags, ready=False))

    def wait_until_ready(self) -> None:
        wait_until_ready(self.process)
        for pid in (self.process.process.pid, *children(self.process.process.pid)):
            os.setpriority(os.PRIO_PROCESS, pid, 10)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait_for_exit(120) == 0, self.process.log()
        log = self.process.log()
        assert "drained" in log or "are cut off" in log
        assert "Traceback" not in log

    def start(self, listen: str) -> None:
        self.process = self._enter(*self._flags, "--listen", listen)
        self.wait_until_ready()

    def close(self) -> None:
        self._stack.close()


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def linked(stub: rpc.TargetServiceStub) -> list[str]:
    """Endpoints that are up; empty while another one is known, too."""
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    states = {each.address: each.state for each in info.speculation_endpoints}
    return sorted(states) if set(states.values()) == {"up"} else []


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "drafts"
        found = ("--draft", f"file://{self.file}")
        self.drafts = [Restarted(draft, folder / f"draft-{i}", *DRAFT) for i in range(2)]
        self.list_drafts()
        self.targets = [
            Restarted(target, folder / f"target-{i}", *TARGET, "--drain-timeout", seconds, *found)
            for i, seconds in enumerate(DRAIN_SECONDS)
        ]
        for each in (*self.drafts, *self.targets):
            each.wait_until_ready()
        self.wait_for_links()

    def list_drafts(self) -> None:
        lines = [each.process.address for each in self.drafts]
        partial = self.file.with_suffix(".new")
        partial.write_text("# HOST:PORT\n" + "\n".join(lines) + "\n")
        partial.replace(self.file)

    def wait_for_links(self) -> None:
        """To all drafts, and to nobody else: who is named no more is not dialled."""
        addresses = sorted(each.process.address for each in self.drafts)
        for serving in self.targets:
            with serving.process.channel() as channel:
                stub = rpc.TargetServiceStub(channel)
                wait_until(lambda stub=stub: linked(stub) == addresses, serving.process.log)

    def restart(self, service: Restarted, elsewhere: bool = False) -> None:
        address = service.process.address
        service.stop()
        service.start("127.0.0.1:0" if elsewhere else address)
        if elsewhere:
            self.list_drafts()
        self.wait_for_links()

    def close(self) -> None:
        for each in (*self.targets, *self.drafts):
            each.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


class Streams:
    """Requests after requests on many threads, each held against what an undisturbed one gave."""

    def __init__(self, addresses: Sequence[str], expected: dict[bytes, str]) -> None:
        self._expected = list(expected.items())
        self._stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException | str] = []
        self._running = [0] * STREAMS  # requests that each has finished
        self._stack = ExitStack()
        orders = (addresses, addresses[::-1])  # half of them begin with either target
        fleets = [self._stack.enter_context(connect(order)) for order in orders]
        self._threads = [
            threading.Thread(target=self._run, args=(number, fleets[number % 2]))
            for number in range(STREAMS)
        ]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def until_all_have_gone_on(self) -> None:
        """Each has finished another request."""
        before = list(self._running)
        wait_until(
            lambda: all(map(int.__gt__, self._running, before)) or self.failures,
            seconds=CALL_SECONDS,
        )

    def _run(self, number: int, endpoints: Sequence[Endpoint]) -> None:
        try:
            turn = number
            while not self._stop.is_set() and not self.failures:
                self._one(endpoints, *self._expected[turn % len(self._expected)])
                self._running[number] += 1
                turn += STREAMS + 1
        except BaseException as error:
            self.failures.append(error)

    def _one(self, endpoints: Sequence[Endpoint], data: bytes, expected: str) -> None:
        text, finished = "", False
        message = pb.GenerateRequest.FromString(data)
        for event in generate(endpoints, message, timeout_s=CALL_SECONDS, policy=RETRIES):
            match event:
                case Tokens():
                    text += event.text
                case Moved():
                    self.counts["moved"] += 1
                    self.counts["resumed"] += event.tokens > 0
                    self.counts["leaving"] += event.leaving
                case Finished(speculation=stats):
                    finished = True
                    self.counts["sped up"] += stats.accepted_tokens if stats else 0
        self.counts["requests"] += 1
        if not finished or text != expected:
            self.failures.append(f"{message}: {text!r}, not {expected!r}")


def undisturbed(server: TargetProcess) -> dict[bytes, str]:
    """Requests, and the texts of plain decoding with the same seeds."""
    texts: dict[bytes, str] = {}
    lock = threading.Lock()

    def plain(message: pb.GenerateRequest) -> tuple[str, list[int]]:
        with connect([server.address]) as endpoints:
            text, tokens = "", []
            for event in generate(endpoints, with_speculation(message, mode=OFF)):
                if isinstance(event, Tokens):
                    text, tokens = text + event.text, tokens + list(event.token_ids)
            return text, tokens

    def both(seed: int) -> None:
        message = request(seed, TOKENS)
        text, tokens = plain(message)
        resumed = request(seed, TOKENS)
        resumed.generated_token_ids = pack_token_ids(tokens[: TOKENS // 3])
        rest, _ = plain(resumed)
        assert text.endswith(rest)
        with lock:
            texts[message.SerializeToString()] = text
            texts[resumed.SerializeToString()] = rest

    threads = [threading.Thread(target=both, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 12
    return texts


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_request_is_lost_and_no_text_is_changed(fleet: Fleet) -> None:
    expected = undisturbed(fleet.targets[0].process)
    addresses = [each.process.address for each in fleet.targets]
    with Streams(addresses, expected) as streams:
        streams.until_all_have_gone_on()
        for _ in range(ROUNDS):
            fleet.restart(fleet.drafts[0])
            fleet.restart(fleet.targets[0])
            fleet.restart(fleet.drafts[1], elsewhere=True)
            fleet.restart(fleet.targets[1])
        before = streams.counts["sped up"]
        streams.until_all_have_gone_on()
    assert not streams.failures
    counts = streams.counts
    print(dict(counts))
    assert counts["requests"] >= 2 * STREAMS
    assert counts["resumed"] > 0  # in the middle of their texts
    assert counts["leaving"] > 0
    assert counts["sped up"] > before > 0  # also by those that were started anew
    for serving in fleet.targets:
        metrics = wait_until_idle(serving.process)
        assert metrics["ssd_discovered_endpoints"] == 2
        assert metrics['ssd_discovery_lookups_total{result="found"}'] > 0
        assert metrics['ssd_discovery_lookups_total{result="failed"}'] == 0
    for drafting in fleet.drafts:
        wait_until(lambda drafting=drafting: is_empty(drafting.process))
