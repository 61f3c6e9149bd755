"""What the benchmarks of speculation share: pinned services, requests, a delay proxy, intervals."""

import contextlib
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client.bench.measure.prompts import STORIES, load_prompts
from ssd_engine.text.token_ids import pack_tokens

MODES = {
    "off": pb.SPECULATION_MODE_OFF,
    "sync": pb.SPECULATION_MODE_SYNC,
    "ssd": pb.SPECULATION_MODE_SSD,
    "not named": pb.SPECULATION_MODE_UNSPECIFIED,
}
VERIFICATIONS = {
    "coupled": pb.VERIFICATION_MODE_COUPLED,
    "rejection": pb.VERIFICATION_MODE_REJECTION,
}


def story_prompts(count: int, seed: int) -> list[str]:
    """Different prompts for different seeds, as far as there are enough of them."""
    return list(load_prompts(STORIES, count, seed).prompts)


def pin_to(core: int, process: int = 0) -> None:
    """A process, or this one, to the first, second, … of the cores that this one may use.

    A child is pinned once it has begun: to run something in it before would need a fork, and a
    process with open gRPC channels had better not fork.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process, {cores[core % len(cores)]})


_started: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}  # services, and their logs


@contextlib.contextmanager
def service(
    module: str,
    *flags: str,
    core: int | None = None,
    ready: bool = True,
    listen: str = "127.0.0.1:0",
) -> Iterator[str]:
    """``ssd_target`` or ``ssd_draft`` on a free port, pinned to a core; its address once ready, or
    as soon as it listens."""
    with tempfile.TemporaryDirectory() as folder:
        port_file, log_file = Path(folder) / "port", Path(folder) / "log"
        command = [sys.executable, "-m", module, "serve", *flags]
        command += ["--listen", listen, "--port-file", str(port_file)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if core is not None:
                pin_to(core, process.pid)
            _wait(process, log_file, port_file.exists)
            address = f"127.0.0.1:{int(port_file.read_text())}"
            _started[address] = (process, log_file)
            if ready:
                wait_until_ready(address)
            yield address
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()


def process_of(address: str) -> subprocess.Popen[bytes]:
    """The front of a service that was started here."""
    return _started[address][0]


def log_of(address: str) -> str:
    """What a service that was started here has logged, while its block lasts."""
    return _started[address][1].read_text()


def _wait(process: subprocess.Popen[bytes], log: Path, done: Callable[[], bool]) -> None:
    while not done():
        if process.poll() is not None:
            raise SystemExit(f"a service ended: {log.read_text()}")
        time.sleep(0.05)


def wait_until_ready(address: str) -> None:
    """Wait for a service that was started here; one that ends instead says why."""
    process, log = _started[address]
    _wait(process, log, lambda: _is_ready(address))


def _is_ready(address: str) -> bool:
    request = health_pb2.HealthCheckRequest(service="readiness")
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True)
class Generated:
    tokens: list[int]
    seconds: float  # from the first token to the last
    stats: pb.SpeculationStats
    text: str = ""
    cached: int = 0  # prompt tokens that were found in the prefix cache
    prompt: int = 0  # its tokens

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


class Client:
    """Requests to one target."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._stub = rpc.TargetServiceStub(grpc.insecure_channel(address))

    def wait_for_links(self, count: int, limit_s: float = 120.0) -> None:
        begin = time.monotonic()
        while True:
            info = self._stub.GetModelInfo(pb.GetModelInfoRequest())
            if sum(e.state == "up" for e in info.speculation_endpoints) >= count:
                return
            if time.monotonic() - begin > limit_s:
                raise SystemExit(f"a link does not come up: {info.speculation_endpoints}")
            time.sleep(0.05)

    def planes(self) -> list[pb.TensorPlaneReport]:
        """The target's ends of the tensor planes of all its links."""
        info = self._stub.GetModelInfo(pb.GetModelInfoRequest())
        return [each for link in info.speculation_endpoints for each in link.planes]

    def generate(
        self,
        prompt: str,
        mode: str,
        tokens: int,
        depth: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        endpoints: Sequence[str] = (),
        generated: Sequence[int] = (),
        before: Sequence[tuple[str, str]] = (),
        top_logprobs: int | None = None,
        verification: str = "coupled",
        grammar: pb.Grammar | None = None,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Generated:
        """``before``: earlier turns of the chat, as (role, text). ``top_logprobs``: None for no log
        probabilities. ``cache_salt``: a prompt is found in the prefix cache by the same one alone.
        ``sampling``: more fields of SamplingOptions."""
        request = pb.GenerateRequest(
            generated_token_ids=pack_tokens(list(generated)),
            sampling=pb.SamplingOptions(temperature=temperature, seed=seed, **sampling),
            stop=pb.StopOptions(max_tokens=tokens, ignore_eos=grammar is None),
            grammar=grammar,
            cache_salt=cache_salt,
            speculation=pb.SpeculationOptions(
                mode=MODES[mode],
                depth=depth,
                endpoints=list(endpoints),
                verification=VERIFICATIONS[verification],
            ),
        )
        if top_logprobs is not None:
            request.logprobs.chosen, request.logprobs.top_n = True, top_logprobs
        for role, content in (*before, ("user", prompt)):
            request.chat.messages.add(role=role, content=content)
        received: list[int] = []
        text, cached, asked = "", 0, 0
        first = last = 0.0
        stats = pb.SpeculationStats()
        for response in self._stub.Generate(request):
            if response.tokens.token_ids:
                last = time.perf_counter()
                # Tokens of one message come at one time: the clock starts with the first message.
                first = first or last
                received += response.tokens.token_ids
            text += response.tokens.text
            if response.WhichOneof("event") == "finish":
                stats = response.finish.speculation
                cached = response.finish.usage.cached_prompt_tokens
                asked = response.finish.usage.prompt_tokens
        return Generated(received, last - first, stats, text, cached, asked)

    def tokens(self, request: pb.GenerateRequest) -> list[int]:
        """All that a request gets."""
        received: list[int] = []
        for response in self._stub.Generate(request):
            received += response.tokens.token_ids
        return received

    def first_token(self, request: pb.GenerateRequest) -> float:
        """Seconds until it comes; what follows is read, too."""
        begin, first = time.perf_counter(), 0.0
        for response in self._stub.Generate(request):
            if response.tokens.token_ids:
                first = first or time.perf_counter() - begin
        return first

    def together(
        self, prompts: Sequence[str], mode: str, tokens: int, temperature: float = 0.0
    ) -> list[Generated]:
        def one(prompt: str) -> Generated:
            return self.generate(prompt, mode, tokens, temperature=temperature)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))


def median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    rounds: int = 2000,
) -> tuple[float, float]:
    """95 % interval of a statistic."""
    rng = random.Random(0)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(rounds))
    return drawn[int(0.025 * rounds)], drawn[int(0.975 * rounds)]


def setting() -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{' '.join(sys.orig_argv[1:])}\n{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}, commit {commit or '?'}"
    )
