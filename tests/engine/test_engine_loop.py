"""The end of an engine whose front is gone: no error, and nothing in its log."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ssd_engine.serving.engine_loop import run_engine


def _engine(pipe: Connection, log: Path, error: type[Exception]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)

    def serve() -> None:
        raise error

    run_engine(pipe, "target", "info", serve)


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError, ConnectionResetError])
def test_an_engine_ends_quietly_with_its_front(tmp_path: Path, error: type[Exception]) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs, tmp_path / "log", error))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    ours.close()
