"""Engines that stand still: when it is noticed, whether texts go on elsewhere, and whether a signal
ends the service."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from ssd_client import Client
from tests.process_tree import computing
from tools.attack.half_record import half_a_record
from tools.attack.scenes import seconds_until, started
from tools.soak.services import Service

TIMEOUT = 5.0  # --engine-timeout
SLACK = 2.0
ASKED: dict[str, Any] = {"max_tokens": 1200, "temperature": 0.7, "seed": 3, "ignore_eos": True}
PROMPT = "Once upon a time"
FLAGS = ["--engine-timeout", str(TIMEOUT), "--threads", "1"]
LEAVE_SECONDS = 60
HANG_NOW = "hang-now"
# A call of the device that does not come back, and lets nothing else of its process run.
HUNG_CALL = """
import ctypes, os, sys
sys.path[:] = [path for path in sys.path if path != os.environ["HUNG_CALL_PATH"]]
try:
    from ssd_engine.execution import runner

    step = runner.ModelRunner.step

    def hung(self, *args, **options):
        if os.path.exists(os.environ["HUNG_CALL"]):
            ctypes.PyDLL(None).sleep(3600)
        return step(self, *args, **options)

    runner.ModelRunner.step = hung
except ImportError:
    pass
"""


@dataclass(frozen=True)
class Frozen:
    what: str
    noticed: float  # seconds until readiness is off
    same_text: bool
    leaves: bool  # when it is told to, frozen as it is

    def __str__(self) -> str:
        good = self.noticed <= TIMEOUT + SLACK and self.same_text and self.leaves
        text = "the same text elsewhere" if self.same_text else "ANOTHER TEXT"
        end = "SIGTERM ends it" if self.leaves else "SIGTERM DOES NOT END IT"
        head = "" if good else "PROBLEM: "
        return f"{head}{self.what}: readiness off after {self.noticed:.1f} s, {text}, {end}"


def freezes(folder: Path) -> Iterator[Frozen]:
    with started(Service("spare", "ssd_target", ["stories-target", *FLAGS], folder)) as spare:
        with Client(spare.address) as client:
            expected = client.generate(PROMPT, **ASKED).text
        yield _target("engine", folder, spare, expected)
        yield _target("rank", folder, spare, expected, "--tp", "2")
        yield _device_call(folder, spare, expected)
        yield _inside_a_record(folder, spare, expected)
        yield _draft_engine(folder, expected)


def _target(what: str, folder: Path, spare: Service, expected: str, *flags: str) -> Frozen:
    service = Service(f"frozen-{what}", "ssd_target", ["stories-target", *FLAGS, *flags], folder)
    with started(service):
        process = computing(service.process.pid)[1 if flags else 0]
        return _freeze(what, service, spare, expected, lambda: os.kill(process, signal.SIGSTOP))


def _device_call(folder: Path, spare: Service, expected: str) -> Frozen:
    with _environment(hung_call(folder)):
        service = Service("frozen-call", "ssd_target", ["stories-target", *FLAGS], folder)
        with started(service):
            hang = (folder / HANG_NOW).touch
            return _freeze("device call", service, spare, expected, hang)


def _inside_a_record(folder: Path, spare: Service, expected: str) -> Frozen:
    stop = folder / "stop"
    with _environment(half_a_record(folder, stop)):
        service = Service("half-a-record", "ssd_target", ["stories-target", *FLAGS], folder)
        with started(service):
            return _freeze("inside a record", service, spare, expected, stop.touch)


def hung_call(folder: Path) -> dict[str, str]:
    """Variables of a service whose device does not come back once the file ``HANG_NOW`` is there:
    every process of it imports what replaces a step."""
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HUNG_CALL)
    path = os.pathsep.join(filter(None, (str(hook), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "HUNG_CALL": str(folder / HANG_NOW),
        "HUNG_CALL_PATH": str(hook),
    }


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _freeze(
    what: str, service: Service, spare: Service, expected: str, freeze: Callable[[], object]
) -> Frozen:
    with (
        Client(service.address, spare.address) as client,
        client.stream(PROMPT, **ASKED) as stream,
    ):
        pieces = stream.text()
        text = next(pieces)
        freeze()
        with _noticed(service) as noticed:
            text += "".join(pieces)
        resumed = stream.result.resumed == 1
    return Frozen(what, noticed[0], resumed and text == expected, _leaves(service))


def _leaves(service: Service) -> bool:
    service.process.terminate()
    try:
        return service.process.wait(LEAVE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False


@contextlib.contextmanager
def _noticed(service: Service) -> Iterator[list[float]]:
    """How many seconds from now on readiness goes off; it is known in the end."""
    seconds: list[float] = []
    looking = threading.Thread(
        target=lambda: seconds.append(seconds_until(lambda: not is_ready(service.address)))
    )
    looking.start()
    yield seconds
    looking.join()


def _draft_engine(folder: Path, expected: str) -> Frozen:
    draft = Service("frozen-draft", "ssd_draft", ["stories-draft", *FLAGS], folder)
    with started(draft):
        flags = ["--draft", draft.address, "--link-timeout", "3600"]
        target = Service("linked", "ssd_target", ["stories-target", *FLAGS, *flags], folder)
        with started(target), Client(target.address) as client:
            seconds_until(lambda: _link_is_up(target.address))
            with client.stream(PROMPT, **ASKED, mode="ssd") as stream:
                pieces = stream.text()
                text = next(pieces)
                os.kill(computing(draft.process.pid)[0], signal.SIGSTOP)
                with _noticed(draft) as noticed:
                    text += "".join(pieces)
            return Frozen("draft engine", noticed[0], text == expected, _leaves(draft))


def is_ready(address: str) -> bool:
    check = health_pb2.HealthCheckRequest(service="readiness")
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(check, timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _link_is_up(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        info = rpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    return any(endpoint.state == "up" for endpoint in info.speculation_endpoints)
