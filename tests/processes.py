"""Real services on loopback, for tests whose promise is about processes."""

import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import speculation_pb2_grpc as speculation_rpc
from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.suite.forked_services import ForkedService, start_service
from tests.waiting import HANG_SECONDS, wait_until

SHIPPED = "stories-target"
SHIPPED_DRAFT = "stories-draft"
# A target that waits for its draft as long as it may, so that what it takes from the draft does not
# depend on how fast the machine is.
PATIENT = (
    *("--no-auto-off", "--no-adapt-depth", "--link-timeout", "3600"),
    *("--backup", "jit", "--wait", "10000"),
)
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class ServiceProcess:
    package: ClassVar[str]
    process: ForkedService | subprocess.Popen[bytes]
    address: str
    log_file: Path

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def health(self, service: str) -> int:
        with self.channel() as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status
        return status

    def is_ready(self) -> bool:
        return self.health("readiness") == SERVING

    def is_alive(self) -> bool:
        """Raises what it has said, if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"exited with {self.process.returncode}: {self.log()}")
        return True

    def log(self) -> str:
        return self.log_file.read_text()

    def kill(self) -> None:
        """SIGKILL to the front; the engine and its ranks notice by themselves."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_for_exit(self, seconds: float = HANG_SECONDS) -> int:
        return self.process.wait(timeout=seconds)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        lines = self.exposition().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
        return {name: float(value) for name, value in pairs}

    def exposition(self) -> str:
        """From the metrics port that the log names."""
        found = re.search(r"metrics on (http://[^\s\"]+)", self.log())
        if found is None:
            raise RuntimeError("this service was started without --metrics-listen")
        with urllib.request.urlopen(found[1], timeout=60) as response:
            text: str = response.read().decode()
        return text


class TargetProcess(ServiceProcess):
    package = "ssd_target"

    def stub(self) -> rpc.TargetServiceStub:
        return rpc.TargetServiceStub(self.channel())


class DraftProcess(ServiceProcess):
    package = "ssd_draft"

    def stub(self) -> speculation_rpc.SpeculationServiceStub:
        return speculation_rpc.SpeculationServiceStub(self.channel())


class GatewayProcess(ServiceProcess):
    package = "ssd_gateway"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False


TracedPair = tuple[TargetProcess, DraftProcess]
Process = TypeVar("Process", bound=ServiceProcess)
Serving = AbstractContextManager[Process]


def target(
    directory: Path, *flags: str, model: str = SHIPPED, **how: bool
) -> Serving[TargetProcess]:
    """``ssd-target serve`` on a free port, with its books checked after every step."""
    return _service(TargetProcess, directory, model, "--check-integrity", *flags, **how)


def draft(
    directory: Path, *flags: str, model: str | None = SHIPPED_DRAFT, **how: bool
) -> Serving[DraftProcess]:
    """``ssd-draft serve`` likewise; without a model it looks n-grams up."""
    what = [model] if model is not None else ["--speculator", "ngram"]
    return _service(DraftProcess, directory, *what, "--check-integrity", *flags, **how)


def gateway(
    directory: Path, *flags: str, targets: Sequence[str], ready: bool = True
) -> Serving[GatewayProcess]:
    """``ssd-gateway serve`` in front of targets; it looks at them often."""
    named = [part for each in targets for part in ("--target", each)]
    often = ("--refresh-seconds", "0.1")
    return _service(GatewayProcess, directory, *named, *often, *flags, ready=ready)


@contextmanager
def _service(
    kind: type[Process],
    directory: Path,
    *arguments: str,
    ready: bool = True,
    new_session: bool = False,
) -> Iterator[Process]:
    directory.mkdir(parents=True, exist_ok=True)
    port_file, log_file = directory / "port", directory / "log"
    command = ["serve", "--listen", "127.0.0.1:0", "--port-file", str(port_file), *arguments]
    process = start_service(kind.package, command, log_file, new_session)
    server = kind(process, "", log_file)
    try:
        wait_until(lambda: server.is_alive() and port_file.exists(), server.log)
        server.address = f"127.0.0.1:{int(port_file.read_text())}"
        if ready:
            wait_until_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_until_ready(server: ServiceProcess) -> None:
    wait_until(lambda: server.is_alive() and server.is_ready(), server.log)


@dataclass
class Output:
    text: str
    tokens: list[int]
    finish: pb.GenerateFinish
    seed: int
    logprobs: list[pb.TokenLogprobs]
    prompt: pb.GeneratePrompt = field(default_factory=pb.GeneratePrompt)  # all of its events


def collect(stream: Iterator[pb.GenerateResponse]) -> Output:
    """Follow a stream to its end, and hold it to its grammar."""
    seed = next(stream).started.seed
    found = Output("", [], pb.GenerateFinish(), seed, [])
    for response in stream:
        event = response.WhichOneof("event")
        if event == "finish":
            assert next(stream, None) is None
            found.finish = response.finish
            return found
        assert event in ("beat", "tokens") or (event == "prompt" and not found.tokens)
        found.text += response.tokens.text
        found.tokens += response.tokens.token_ids
        found.logprobs += response.tokens.logprobs
        found.prompt.token_ids += response.prompt.token_ids
        found.prompt.text += response.prompt.text
        found.prompt.text_lengths.extend(response.prompt.text_lengths)
        found.prompt.logprobs.extend(response.prompt.logprobs)
    raise AssertionError("the stream ended without a finish")


def link_states(server: TargetProcess) -> list[str]:
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest())
    return [endpoint.state for endpoint in info.speculation_endpoints]


def wait_until_idle(server: TargetProcess) -> dict[str, float]:
    """Until no sequence runs and no block is held; returns the metrics then."""

    def idle() -> dict[str, float] | None:
        metrics = server.metrics()
        return None if any(metrics[name] for name in HELD) else metrics

    metrics = wait_until(idle, server.exposition)
    assert metrics is not None
    return metrics


HELD = (
    "ssd_num_requests_running",
    "ssd_num_requests_waiting",
    "ssd_kv_cache_usage_ratio",
    "ssd_kv_cache_reserved_blocks",
)
