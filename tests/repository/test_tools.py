"""A tool that is not there is named at the very end, and in full mode it is a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WANTS = """
import pytest
from tests.suite.tools import needs_tool

@pytest.fixture
def broken():
    raise RuntimeError("the tool is looked for before any fixture")

@needs_tool("frobnicator", "no-such-program", "nor-this-one")
@pytest.mark.parametrize("n", [1, 2])
def test_wants_one(n, broken):
    pass

@needs_tool("sh")
def test_has_one():
    pass
"""


def run_pytest(folder: Path, full: str) -> tuple[int, str]:
    (folder / "test_wants.py").write_text(WANTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-ra", "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "SSD_TEST_FULL": full,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout


def test_what_was_skipped_for_a_tool_is_said_last(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, full="")
    assert code == 0, output
    *_, line, took, counts = output.strip().splitlines()
    assert line == "2 skipped: needs frobnicator (2)"
    assert "the cores of this machine were busy for" in took
    assert "1 passed, 2 skipped" in counts


def test_in_full_mode_a_missing_tool_is_a_failure_that_names_it(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, full="1")
    assert code == 1
    assert "needs frobnicator: none of no-such-program, nor-this-one is on PATH" in output
    assert "2 errors" in output
    assert "RuntimeError" not in output


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_make_runs_all_tests_at_once_and_shows_the_ten_slowest(target: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={sys.prefix}"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    (run,) = [line for line in planned.splitlines() if "pytest" in line]
    assert "--durations 10" in run
    assert ("SSD_TEST_FULL=1" in run) == (target == "test-full")
