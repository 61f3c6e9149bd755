"""The end of an engine whose front is gone: no error, and nothing in its log."""

import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ssd_serving.engine.loop import run_engine
from tests.suite.forked_services import start_process
from tests.suite.scale import full_only


def _engine(pipe: Connection, log: Path, does: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    run_engine(pipe, "target", "info", lambda: _live(pipe, does))


def _live(pipe: Connection, does: str) -> None:
    pipe.send("ready")
    while does == "writes":
        pipe.send("ready")
    if does == "reads what is reset":
        pipe.send("nobody reads this")
    pipe.recv()


@pytest.mark.parametrize("does", [full_only("reads"), "reads what is reset", full_only("writes")])
def test_an_engine_ends_quietly_with_its_front(tmp_path: Path, does: str) -> None:
    ours, theirs = Pipe()
    process = start_process("engine", _engine, theirs, tmp_path / "log", does)
    theirs.close()
    assert ours.recv() == "ready"
    if does == "reads what is reset":
        assert ours.poll(60)
    ours.close()
    process.join(120)
    assert process.exitcode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
