"""The end of an engine whose front is gone: no error, and nothing in its log."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ssd_serving.engine.loop import run_engine
from tests.suite.scale import full_only


def _reads(pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()


def _reads_what_is_reset(pipe: Connection) -> None:
    pipe.send("ready")
    pipe.send("nobody reads this")
    pipe.recv()


def _writes(pipe: Connection) -> None:
    while True:
        pipe.send("ready")


def _engine(pipe: Connection, log: Path, does: Callable[[Connection], None]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    run_engine(pipe, "target", "info", lambda: does(pipe))


@pytest.mark.parametrize("does", [full_only(_reads), _reads_what_is_reset, full_only(_writes)])
def test_an_engine_ends_quietly_with_its_front(
    tmp_path: Path, does: Callable[[Connection], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs, tmp_path / "log", does))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    if does is _reads_what_is_reset:
        assert ours.poll(60)
    ours.close()
    process.join(120)
    assert process.exitcode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
