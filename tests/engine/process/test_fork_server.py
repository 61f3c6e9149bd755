"""A process that has imported what others need, and forks itself for them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from ssd_engine.process.fork_server import ForkServer
from tests.engine.process import forked
from tests.process_tree import is_alive
from tests.waiting import HANG_SECONDS, wait_until

# A process without threads starts a server, a child of it says that it lives, and then all wait.
STARTER = """
import os, sys
from multiprocessing import Pipe
from ssd_engine.process.fork_server import ForkServer, fork_server_here
from tests.engine.process.forked import describe, stay

forks = fork_server_here(sys.argv[1:])
for work in describe, stay:
    ours, theirs = Pipe()
    forks.start("child", work, theirs)
    theirs.close()
    print(ours.recv(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A fresh process: the one of the tests may have threads."""
    forks = ForkServer()
    yield forks
    forks.stop()


@pytest.fixture
def starter(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """Of a server that has imported these modules."""
    command = [sys.executable, "-c", STARTER, *request.param]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process
        process.kill()


def line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return eval(process.stdout.readline())


@pytest.mark.parametrize("starter", [["ssd_target.engine.engine_process"]], indirect=True)
def test_an_engines_server_has_torch_and_neither_threads_nor_cuda_nor_grpc(
    starter: "subprocess.Popen[str]",
) -> None:
    found = line(starter)
    assert found["torch"]
    assert found["threads of the server"] == 1
    assert not found["cuda"]
    assert not found["grpc"]
    assert found["name"] == "child"
    assert found["ignores signals"]
    assert found["numpy's threads"] == os.environ.get("OPENBLAS_NUM_THREADS")
    assert found["server"] != starter.pid


@pytest.mark.parametrize("starter", [[]], indirect=True)
@pytest.mark.parametrize("which", ["starter", "server"])
def test_children_end_with_their_server_and_it_with_its_starter(
    starter: "subprocess.Popen[str]", which: str
) -> None:
    server, child = line(starter)["server"], line(starter)
    os.kill(starter.pid if which == "starter" else server, signal.SIGKILL)
    wait_until(lambda: not is_alive(child), "the child ends")
    wait_until(lambda: not is_alive(server), "the server ends")


def test_a_server_whose_starter_lets_go_of_it_ends() -> None:
    other = ForkServer()
    ours, theirs = Pipe()
    child = other.start("child", forked.stay, theirs)
    assert ours.recv() == child.pid
    other.stop()
    wait_until(lambda: not is_alive(child.pid))
    assert child.exitcode == -signal.SIGKILL


def test_what_a_server_that_has_ended_is_asked_for_ends_at_once() -> None:
    other = ForkServer()
    ours, theirs = Pipe()
    other.start("child", forked.describe, theirs)
    server = ours.recv()["server"]
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not is_alive(server))
    child = other.start("too late", forked.end, SystemExit(0))
    assert (child.pid, child.exitcode) == (0, -signal.SIGKILL)
    child.kill()
    other.stop()


@pytest.mark.parametrize(
    ("how", "code"),
    [(SystemExit(), 0), (SystemExit(3), 3), (SystemExit("why"), 1), (ValueError("why"), 1)],
)
def test_how_a_child_ends_is_known(
    server: ForkServer, how: BaseException, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    child = server.start("child", forked.end, how)
    child.join(HANG_SECONDS)
    assert child.exitcode == code
    assert not child.is_alive()


def test_children_live_side_by_side_and_one_may_be_killed(server: ForkServer) -> None:
    """The end of one is an end of its pipe: none holds an end of another's."""
    pipes = [Pipe() for _ in range(3)]
    children = [server.start(f"child {i}", forked.stay, pipe[1]) for i, pipe in enumerate(pipes)]
    assert [ours.recv() for ours, _ in pipes] == [child.pid for child in children]
    ours, theirs = pipes[1]
    theirs.close()
    children[1].kill()
    with pytest.raises(EOFError):
        ours.recv()
    children[1].join(HANG_SECONDS)
    assert [child.exitcode for child in children] == [None, -signal.SIGKILL, None]
