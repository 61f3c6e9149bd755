"""``pytest --workers N``: one process collects all tests, then forks N that run them.

What tests import is imported once, and shared. Groups of tests are dealt out, the longest first,
each to the next worker that is free; what tests of a group share ends with it.
"""

import contextlib
import gc
import os
import pickle
import selectors
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.suite.dealing import Group, deal

READY = "ready"  # said by a worker that has nothing to do
STARTED, REPORT, WARNING = "started", "report", "warning"


def add_options(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="fork so many processes that run the tests; 0: this one does",
    )


def run_in_workers(session: pytest.Session) -> bool | None:
    """In place of pytest's own loop."""
    number = session.config.option.workers
    if not number or session.config.option.collectonly:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    threads = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        raise pytest.UsageError(f"collecting tests has started threads: {', '.join(threads)}")
    gc.collect()
    gc.freeze()
    try:
        _Leader(session, deal(session.items)).run(number)
    finally:
        gc.unfreeze()
    return True


@dataclass
class _Worker:
    number: int
    pid: int
    pipe: Connection
    group: Group | None = None
    unfinished: deque[str] = field(default_factory=deque)  # tests of its group
    running: str = ""


class _Leader:
    def __init__(self, session: pytest.Session, groups: Sequence[Group]) -> None:
        self._session, self._config = session, session.config
        self._groups = deque(groups)
        self._items = {item.nodeid: item for item in session.items}
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._forked = 0

    def run(self, number: int) -> None:
        for _ in range(min(number, len(self._groups))):
            self._fork()
        try:
            while self._workers:
                for key, _ in self._selector.select():
                    self._hear(key.data)
                self._stop_if_told()
        finally:
            for worker in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        self._forked += 1
        number = self._forked
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            ours.close()
            for other in self._workers.values():
                other.pipe.close()
            _work(self._session, theirs, number)
        theirs.close()
        worker = _Worker(number, pid, ours)
        self._workers[pid] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, what = worker.pipe.recv()
        except (EOFError, ConnectionError):
            self._bury(worker)
            return
        if kind == READY:
            self._give(worker)
        elif kind == STARTED:
            worker.running = what
            item = self._items[what]
            self._config.hook.pytest_runtest_logstart(nodeid=what, location=item.location)
        elif kind == WARNING:
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=pickle.loads(what))
        else:
            self._take(worker, what)

    def _take(self, worker: _Worker, data: dict[str, Any]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            worker.unfinished.remove(report.nodeid)
            worker.running = ""

    def _give(self, worker: _Worker) -> None:
        if not self._groups:
            worker.pipe.send(None)
            return
        worker.group = self._groups.popleft()
        worker.unfinished = deque(worker.group.tests)
        worker.pipe.send(worker.group.tests)

    def _bury(self, worker: _Worker) -> None:
        """A worker that had work left has crashed in the test that ran; another one goes on."""
        self._selector.unregister(worker.pipe)
        del self._workers[worker.pid]
        _, status = os.waitpid(worker.pid, 0)
        if not worker.unfinished:
            return
        crashed = worker.running or worker.unfinished[0]
        code = os.waitstatus_to_exitcode(status)
        report = pytest.TestReport(
            crashed,
            self._items[crashed].location,
            {},
            "failed",
            f"the worker ended with exit code {code}, in {crashed}",
            "call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)
        left = [test for test in worker.unfinished if test != crashed]
        if left:
            self._groups.appendleft(Group(left, 0.0))
        if self._groups:
            self._fork()

    def _stop_if_told(self) -> None:
        """By --exitfirst and --maxfail."""
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)


def _work(session: pytest.Session, leader: Connection, number: int) -> NoReturn:
    """The whole of a worker's life."""
    code = 1
    try:
        _capture_alone(session.config)
        os.environ["SSD_TEST_WORKER"] = str(number)
        session.config.pluginmanager.register(_Teller(session.config, leader))
        items = {item.nodeid: item for item in session.items}
        leader.send((READY, None))
        while (tests := leader.recv()) is not None:
            for test, after in zip(tests, [*tests[1:], None], strict=True):
                leader.send((STARTED, test))
                item = items[test]
                follows = None if after is None else items[after]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=follows)
            leader.send((READY, None))
        code = 0
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass
    except BaseException:
        sys.__stderr__ and sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _capture_alone(config: pytest.Config) -> None:
    """Files that are captured, and the terminal, are the leader's."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)
    capture.start_global_capturing()
    terminal = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(terminal)


class _Teller:
    """Passes on to the leader what a worker's tests come to."""

    def __init__(self, config: pytest.Config, leader: Connection) -> None:
        self._config, self._leader = config, leader

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._leader.send((REPORT, data))

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        about = {"when": when, "nodeid": nodeid, "location": location}
        with contextlib.suppress(Exception):  # one that cannot be pickled
            data = pickle.dumps({"warning_message": warning_message, **about})
            self._leader.send((WARNING, data))
