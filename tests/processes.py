"""Real services on loopback, for tests whose promise is about processes."""

import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def target(
    directory: Path,
    *flags: str,
    model: str = SHIPPED,
    ready: bool = True,
    new_session: bool = False,
) -> Iterator[TargetProcess]:
    """``ssd-target serve`` on a free port, with its books checked after every step."""
    command = ["serve", model]
    with _service(TargetProcess, command, flags, directory, ready, new_session) as process:
        yield process


@contextmanager
def draft(
    directory: Path,
    *flags: str,
    model: str | None = SHIPPED_DRAFT,
    ready: bool = True,
    new_session: bool = False,
) -> Iterator[DraftProcess]:
    """``ssd-draft serve`` likewise; without a model it looks n-grams up."""
    what = [model] if model is not None else ["--speculator", "ngram"]
    command = ["serve", *what]
    with _service(DraftProcess, command, flags, directory, ready, new_session) as process:
        yield process


@contextmanager
def gateway(
    directory: Path, *flags: str, targets: Sequence[str], ready: bool = True
) -> Iterator[GatewayProcess]:
    """``ssd-gateway serve`` in front of targets; it looks at them often."""
    named = [part for each in targets for part in ("--target", each)]
    flags = (*named, "--refresh-seconds", "0.1", *flags)
    with _service(GatewayProcess, ["serve"], flags, directory, False, False) as process:
        if ready:
            wait_until(process.is_ready, process.log)
        yield process


Process = TypeVar("Process", bound=ServiceProcess)


@contextmanager
def _service(
    kind: type[Process],
    command: list[str],
    flags: Sequence[str],
    directory: Path,
    ready: bool,
    new_session: bool,
) -> Iterator[Process]:
    directory.mkdir(parents=True, exist_ok=True)
    port_file, log_file = directory / "port", directory / "log"
    checked = [] if kind is GatewayProcess else ["--check-integrity"]  # it has no engine
    listening = ["--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    arguments = [*command, *checked, *listening, *flags]
    process = start_service(kind.package, arguments, log_file, new_session)
    try:
        port = _wait_for_port(process, port_file, log_file)
        server = kind(process, f"127.0.0.1:{port}", log_file)
        if ready:
            wait_until_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_for_port(
    process: ForkedService | subprocess.Popen[bytes], port_file: Path, log_file: Path
) -> int:
    def listens() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"exited with {process.returncode}: {log_file.read_text()}")
        return port_file.exists()

    wait_until(listens, log_file.read_text)
    return int(port_file.read_text())


def wait_until_ready(server: ServiceProcess) -> None:
    def is_ready() -> bool:
        if server.process.poll() is not None:
            raise RuntimeError(f"exited: {server.log()}")
        return server.health("readiness") == SERVING

    wait_until(is_ready, server.log)


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
    started = next(stream).started
    text, tokens, logprobs, prompt = "", [], [], pb.GeneratePrompt()
    for response in stream:
        if response.WhichOneof("event") == "finish":
            assert next(stream, None) is None
            return Output(text, tokens, response.finish, started.seed, logprobs, prompt)
        if response.WhichOneof("event") == "prompt":
            assert not tokens
            _append(prompt, response.prompt)
            continue
        if response.WhichOneof("event") == "beat":
            continue
        assert response.WhichOneof("event") == "tokens"
        text += response.tokens.text
        tokens += response.tokens.token_ids
        logprobs += response.tokens.logprobs
    raise AssertionError("the stream ended without a finish")


def _append(prompt: pb.GeneratePrompt, more: pb.GeneratePrompt) -> None:
    prompt.token_ids += more.token_ids
    prompt.text += more.text
    prompt.text_lengths.extend(more.text_lengths)
    prompt.logprobs.extend(more.logprobs)


def link_states(server: TargetProcess) -> list[str]:
    info = server.stub().GetModelInfo(pb.GetModelInfoRequest())
    return [endpoint.state for endpoint in info.speculation_endpoints]


def wait_until_idle(server: TargetProcess) -> dict[str, float]:
    """Until no sequence runs and no block is held; returns the metrics then."""

    def idle() -> dict[str, float] | None:
        metrics = server.metrics()
        held = (
            metrics["ssd_num_requests_running"],
            metrics["ssd_num_requests_waiting"],
            metrics["ssd_kv_cache_usage_ratio"],
            metrics["ssd_kv_cache_reserved_blocks"],
        )
        return None if any(held) else metrics

    metrics = wait_until(idle, server.exposition)
    assert metrics is not None
    return metrics
