"""The services under load, as processes: started, paused, killed, measured."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.process_tree import computing

START_SECONDS = 180  # generous: the machine may be busy


class SoakFailed(Exception):
    """A service does not do what the soak needs of it."""


@dataclass(frozen=True)
class Figures:
    """What one process holds."""

    rss_mib: float
    descriptors: int
    threads: int
    files: tuple[str, ...] = ()  # what the descriptors are


def figures_of(pid: int) -> Figures:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    files = files_of(pid)
    return Figures(
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(files),
        threads=_count_threads(pid),
        files=files,
    )


def _count_threads(pid: int) -> int:
    """All but gRPC's pool: it grows when many connections come at once, and stays so."""
    names = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            names.append((thread / "comm").read_text().strip())
    return sum(name != "event_engine" for name in names)


def files_of(pid: int) -> tuple[str, ...]:
    """What each descriptor of a process is; of a connection its ends and its state."""
    sockets = {
        f"socket:[{row[9]}]": f"tcp {row[1]} {row[2]} state {row[3]}"
        for table in ("tcp", "tcp6")
        for row in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
    }
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            link = os.readlink(descriptor)
            found.append(sockets.get(link, link))
    return tuple(sorted(found))


class Service:
    """``ssd-target`` or ``ssd-draft``; once started it keeps its address through restarts."""

    def __init__(self, name: str, module: str, flags: list[str], folder: Path) -> None:
        self.name = name
        self._module, self._flags = module, flags
        self._port_file = folder / f"{name}.port"
        self._metrics_file = folder / f"{name}.log"
        self.address = "127.0.0.1:0"
        self.starts = 0

    def start(self) -> None:
        command = [sys.executable, "-m", self._module, "serve", *self._flags]
        command += ["--listen", self.address, "--port-file", str(self._port_file)]
        command += ["--metrics-listen", "127.0.0.1:0"]
        self._port_file.unlink(missing_ok=True)
        with self._metrics_file.open("ab") as log:
            self._log_begin = log.tell()
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.starts += 1

    def wait_until_ready(self) -> None:
        self._wait(self._port_file.exists)
        self.address = f"127.0.0.1:{int(self._port_file.read_text())}"
        self._wait(self.is_ready)

    def _wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not done():
            if self.process.poll() is not None:
                raise SoakFailed(f"{self.name} ended with {self.process.returncode}: {self.log()}")
            if time.monotonic() > end:
                raise SoakFailed(f"{self.name} does not become ready: {self.log()}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        request = health_pb2.HealthCheckRequest(service="readiness")
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def log(self) -> str:
        """Since the last start."""
        return self._metrics_file.read_bytes()[self._log_begin :].decode(errors="replace")

    def whole_log(self) -> str:
        return self._metrics_file.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        url = next(word for word in self.log().split() if word.endswith("/metrics"))
        with urllib.request.urlopen(url, timeout=30) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
        return {name: float(value) for name, value in pairs}

    def processes(self) -> dict[str, int]:
        """Its front and its engine."""
        front = self.process.pid
        return {"front": front, **dict(zip(("engine",), computing(front), strict=False))}

    def figures(self) -> dict[str, Figures]:
        return {role: figures_of(pid) for role, pid in self.processes().items()}

    def signal(self, number: signal.Signals) -> None:
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """In order; returns its exit code."""
        self.process.terminate()
        return self.process.wait(120)

    def close(self) -> None:
        if getattr(self, "process", None) is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
