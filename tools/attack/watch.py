"""What others notice while a service is attacked: their first tokens, its memory and its files."""

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tools.attack.callers import OTHER, bearer, others_prompt, request
from tools.soak.services import Service

BEFORE_SECONDS, DURING_SECONDS, REST_SECONDS, AFTER_SECONDS = 4.0, 8.0, 5.0, 4.0
SETTLE_SECONDS = 1.0  # until an attack is under way
PAUSE_SECONDS = 0.05  # between two requests of the others
TIMES, SLACK_MS, MOST_MIB, SPARE_FILES = 2.0, 100.0, 300.0, 8


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def num_files(pid: int) -> int:
    """What each of them is would take so long that others seem to wait."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass
class Phase:
    """Some seconds of watching."""

    first_ms: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.first_ms)

    @property
    def worst_ms(self) -> float:
        """All but one of twenty are quicker."""
        return sorted(self.first_ms)[int(0.95 * (len(self.first_ms) - 1))]

    def told(self) -> str:
        return f"{self.median_ms:6.0f} ({self.worst_ms:.0f})"


@dataclass
class Row:
    attack: str
    before: Phase
    during: Phase
    after: Phase
    note: str = ""
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """None beyond twice, or 100 ms; none above 300 MiB; all back at rest."""
        bound = max(TIMES * self.before.worst_ms, SLACK_MS)
        for name, phase in (("during", self.during), ("after", self.after)):
            if phase.worst_ms > bound:
                self.problems.append(f"first token {name} it: {phase.worst_ms:.0f} ms")
        grown = max(self.during.mib) - statistics.median(self.before.mib)
        if grown > MOST_MIB:
            self.problems.append(f"{grown:.0f} MiB more")
        if min(self.after.files) > max(self.before.files) + SPARE_FILES:
            self.problems.append(f"{min(self.after.files)} files, {max(self.before.files)} before")


def others_first_token(address: str) -> Callable[[int], float]:
    """Return what asks on a connection that is kept, and gives the milliseconds."""
    return first_token_of(address, lambda number: request(others_prompt(number), seed=number))


def first_token_of(
    address: str, request_of: Callable[[int], pb.GenerateRequest]
) -> Callable[[int], float]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    stub = rpc.TargetServiceStub(grpc.insecure_channel(address, options))

    def ask(number: int) -> float:
        begin, first = time.monotonic(), 0.0
        call = stub.Generate(request_of(number), timeout=120, metadata=bearer(OTHER))
        for response in call:
            if not first and response.WhichOneof("event") == "tokens":
                first = time.monotonic() - begin
        return 1e3 * first

    return ask


class Watch:
    """Others, who go on asking, and the processes of a service."""

    def __init__(self, service: Service, ask: Callable[[int], float]) -> None:
        self._service, self._ask = service, ask
        self._asked = 0

    def phase(self, seconds: float) -> Phase:
        phase, end = Phase(), time.monotonic() + seconds
        stop = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(phase, stop))
        sampler.start()
        try:
            while time.monotonic() < end or len(phase.first_ms) < 3:
                self._asked += 1
                phase.first_ms.append(self._ask(self._asked))
                time.sleep(PAUSE_SECONDS)
        finally:
            stop.set()
            sampler.join()
        return phase

    def _sample(self, phase: Phase, stop: threading.Event) -> None:
        while True:
            pids = list(self._service.processes().values())
            phase.mib.append(sum(map(rss_mib, pids)))
            phase.files.append(sum(map(num_files, pids)))
            if stop.wait(0.25):
                return

    def row(self, attack: str, attackers: contextlib.AbstractContextManager[object]) -> Row:
        """Before, during, and five seconds after."""
        before = self.phase(BEFORE_SECONDS)
        with attackers:
            time.sleep(SETTLE_SECONDS)
            during = self.phase(DURING_SECONDS)
        time.sleep(REST_SECONDS)
        row = Row(attack, before, during, self.phase(AFTER_SECONDS))
        row.judge()
        return row


@contextlib.contextmanager
def attacker(name: str, address: str, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tools.attack.attackers", name, address]
    command += map(str, numbers)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        if process.poll() is not None:
            raise SystemExit(f"{name} ended by itself with {process.returncode}")
    finally:
        process.kill()
