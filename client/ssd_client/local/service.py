"""A service of this project as a process of its own, for as long as a command runs.

The process never outlives the client: it is stopped at the end of the `with` block, whatever ends
it, SIGTERM and SIGHUP included; on Linux the kernel stops it when the client is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ssd_client.connection.endpoints import connect
from ssd_client.errors import ClientError

NEEDS_SERVE = '--local needs the serving extra: pip install "ssd-serve[serve]"'

_POLL_S = 0.05
_CHECK_S = 2.0
_STARTUP_S = 300.0
_GRACE_S = 10.0
_LAST_LINES = 15
_PR_SET_PDEATHSIG = 1


class LocalService:
    """Context manager around `python -m MODULE serve …`: in it, the service has an `address`.

    It listens then, but may still load: see `wait_until_ready`. Enter it from a thread that lives
    as long as the block: on Linux the service is stopped with the thread that started it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        name: str,  # in messages
        listen: str = "127.0.0.1:0",
        needs: str = NEEDS_SERVE,  # what to say where a module is missing
        environment: Mapping[str, str] | None = None,  # on top of ours
        cores: Collection[int] | None = None,  # None: any
    ) -> None:
        self.name = name
        self.address = ""
        self._module, self._needs = module, needs
        self._arguments = ["serve", *arguments]
        self._listen = listen
        self._environment = environment or {}
        self._cores = cores

    def __enter__(self) -> LocalService:
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals_as_exit())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssd-local-")))
            self._log = folder / "log"
            self._begun = time.monotonic()
            self._process = self._start(folder / "port")
            stack.callback(_stop, self._process)
            host = self._listen.rpartition(":")[0]
            self.address = f"{host}:{self._wait_for_port(folder / 'port')}"
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def check_starting(self) -> None:
        """Raises ClientError, with the last lines of its log, once the start has failed."""
        if self._process.poll() is not None:
            raise ClientError(self.last_words())
        if time.monotonic() - self._begun > _STARTUP_S:
            limit = f"{_STARTUP_S:g} s"
            raise ClientError(f"{self.name} was not ready after {limit}{self._log_tail()}")

    def ask_to_stop(self) -> None:
        """Begins what the end of the block completes, so that several services stop at a time."""
        self._process.terminate()

    def has_died(self) -> bool:
        """Whether the process is gone; a lost stream may be noticed a little before it is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode is not None

    def check_running(self) -> None:
        """Raises ClientError, with the last lines of its log, once the process is gone."""
        if self.has_died():
            raise ClientError(self.last_words())

    def last_words(self) -> str:
        """Why a process that is gone ended."""
        log = self._log.read_text(errors="replace")
        if "ModuleNotFoundError" in log:
            return f"{self._needs} ({log.strip().splitlines()[-1]})"
        return f"{self.name} ended with {_status(self._process.returncode)}{self._log_tail()}"

    def _start(self, port_file: Path) -> subprocess.Popen[bytes]:
        listening = ["--listen", self._listen, "--port-file", str(port_file)]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, *self._arguments, *listening],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Modules that lie in the user's folder by chance are not the service's.
                env={**os.environ, **self._environment, "PYTHONSAFEPATH": "1"},
                # A group of its own: Ctrl-C reaches the client only, which then stops the group.
                start_new_session=True,
                preexec_fn=_before_it_runs(self._cores),
            )

    def _wait_for_port(self, port_file: Path) -> int:
        while not port_file.exists():
            self.check_starting()
            time.sleep(_POLL_S)
        content = port_file.read_text()
        try:
            return int(content)
        except ValueError:
            raise ClientError(f"{self.name}: no port in its port file: {content!r}") from None

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "".join(["; its last lines:", *(f"\n  {line}" for line in lines)]) if lines else ""


def wait_until_ready(services: Sequence[LocalService]) -> None:
    """Waits until all of them are; raises ClientError as soon as one has failed.

    Start them all before: a process with open gRPC channels had better not fork.
    """
    with connect([each.address for each in services]) as endpoints:
        waiting = list(endpoints)
        while waiting := [each for each in waiting if each.readiness(_CHECK_S) != "ready"]:
            for service in services:
                service.check_starting()
            time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the service to stop; what of its group is left after the grace is killed."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:  # also when a second Ctrl-C cuts the grace short
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP become SystemExit, so that `finally` and `with` do their work."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]  # nohup
    before = {n: signal.signal(n, _raise_exit) for n in numbers if n not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _before_it_runs(cores: Collection[int] | None) -> Callable[[], None] | None:
    """What a child does before its program, on Linux: stays on its cores, and has the kernel end it
    with its parent.

    The kernel sends the signal as each thread of the parent dies, so it may come more than once.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: little is safe between fork and exec
    parent = os.getpid()

    def arm() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return arm


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"signal {-returncode}"
    return f"status {returncode}"
