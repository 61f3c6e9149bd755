"""Services and other processes that tests start, forked from one that has imported what they need.

It begins when the tests do, and serves all workers. What it imports has no gRPC, whose threads do
not survive a fork; a service imports that for itself.
"""

import importlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ssd_engine.process.fork_server import ForkedProcess, ForkServer

PRELOAD = (
    "ssd_target.engine.engine_process",
    "ssd_draft.engine.engine_process",
    "ssd_target.cli",
    "ssd_draft.cli",
    "ssd_gateway.cli",
    "ssd.v1.target_pb2",
    "ssd.v1.speculation_pb2",
    "ssd.v1.trace_pb2",
    "ssd_engine.text.tokenizer",
    "google.rpc.status_pb2",
    "cryptography.x509",
    "prometheus_client",
    "opentelemetry.trace",
    "starlette.applications",
    "uvicorn",
    "jinja2",
)
_forks: ForkServer | None = None
_python = (sys.executable, os.environ.get("PYTHONPATH"))


def begin() -> None:
    """Before anything has threads."""
    global _forks
    _forks = ForkServer(PRELOAD)


def start_process(name: str, target: Callable[..., Any], *args: Any) -> ForkedProcess:
    """Calls ``target`` in a process that has torch."""
    if _forks is None:  # pytest has no workers
        begin()
    assert _forks is not None
    return _forks.start(name, target, *args)


def results(name: str, target: Callable[..., Any], many: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What ``target`` returns for each of these arguments, in processes side by side."""
    pipes = []
    for args in many:
        ours, theirs = Pipe(duplex=False)
        start_process(name, _send_result, theirs, target, args)
        theirs.close()
        pipes.append(ours)
    return [pipe.recv() for pipe in pipes]


def _send_result(pipe: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(target(*args))


class ForkedService:
    """A service, with what tests use of a Popen."""

    def __init__(self, child: ForkedProcess) -> None:
        self._child = child
        self.pid = child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self._child.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._child.name, timeout or 0.0)
        code = self._child.exitcode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_service(
    package: str, arguments: Sequence[str], log: Path, new_session: bool = False
) -> "ForkedService | subprocess.Popen[bytes]":
    """``python -m package arguments``, in the environment as it is now. Where a test has
    changed Python itself, or how it starts, it is a fresh one."""
    if _forks is None or (sys.executable, os.environ.get("PYTHONPATH")) != _python:
        command = [sys.executable, "-m", package, *arguments]
        with log.open("wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=new_session
            )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    about = (package, list(arguments), str(log), dict(os.environ), os.getcwd(), files, new_session)
    return ForkedService(_forks.start(package.replace("_", "-"), _serve, *about))


def _serve(
    package: str,
    arguments: list[str],
    log: str,
    environment: Mapping[str, str],
    folder: str,
    files: tuple[int, int],
    new_session: bool,
) -> None:
    """What a fresh Python would be: the caller's environment, signals, files and their limit."""
    if new_session:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    for source, number in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, number)
    os.close(nothing)
    os.close(file)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    program = package.replace("_", "-")
    sys.argv = [program, *arguments]
    importlib.import_module(f"{package}.cli").main(prog_name=program)
