"""The tests' own runner: nothing is lost between the process that collects and those that run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite.dealing import RECORDED
from tests.suite.tiers import PROCESSES, PURE, TORCH, tier_of

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import pytest
from tests.suite import workers

def pytest_addoption(parser):
    workers.add_options(parser.getgroup("suite"))

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    return workers.run_in_workers(session)
"""
ALL_KINDS = """
import os, warnings
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with open("made", "a") as file:
        file.write("x")

def test_passes(made): print("a")
def test_fails(made): assert 1 == 2, "as told"
def test_crashes(made): os._exit(3)
def test_comes_after(made): warnings.warn("be warned")
@pytest.mark.skip(reason="no need")
def test_is_skipped(): pass
def test_ends_badly(request):
    request.addfinalizer(lambda: 1 / 0)
"""


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


def run(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-rA", *options, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """Tests of all kinds, and what runs them in workers."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_kinds.py").write_text(ALL_KINDS)
    (tmp_path / "test_more.py").write_text("def test_more(): pass\n")
    return tmp_path


def test_forked_workers_tell_what_a_single_process_would(kinds: Path) -> None:
    code, said = run(kinds, "--workers", "2")
    assert code == 1, said
    for words in (
        "2 failed, 4 passed, 1 skipped, 1 warning, 1 error",
        "as told",
        "the worker ended with exit code 3, in test_kinds.py::test_crashes",
        "be warned",
        "ZeroDivisionError",
    ):
        assert words in said
    assert (kinds / "made").read_text() == "xx"  # once more for what the crash had left


def test_the_first_failure_may_end_the_run(kinds: Path) -> None:
    code, said = run(kinds, "--workers", "2", "--exitfirst")
    assert code in (1, 2)
    assert "stopping after 1 failures" in said
    assert "test_crashes" not in said


def test_what_was_skipped_for_want_of_a_tool_and_what_it_took_is_said_last(tmp_path: Path) -> None:
    (tmp_path / "test_wants.py").write_text(WANTS)
    code, said = run(tmp_path, "-p", "tests.conftest", SSD_MAKE_BEGUN="0.0 0 0 0")
    assert code == 0, said
    *_, line, took, counts = said.strip().splitlines()
    assert line == "2 skipped: needs frobnicator (2)"
    one = r"\d+ min \d+ s, \d+ CPU-seconds of this machine"
    assert re.fullmatch(f"tests: {one}; in all: {one}", took)
    assert "1 passed, 2 skipped" in counts


@pytest.mark.parametrize("variable", ["SSD_TEST_FULL=1", "SSD_TEST_NEEDS=Chromium,frobnicator"])
def test_a_missing_tool_that_is_needed_is_a_failure_that_names_it(
    tmp_path: Path, variable: str
) -> None:
    (tmp_path / "test_wants.py").write_text(WANTS)
    code, said = run(tmp_path, "-p", "tests.conftest", **dict([variable.split("=")]))
    assert code == 1
    assert "needs frobnicator: none of no-such-program, nor-this-one is on PATH" in said
    assert "2 errors" in said
    assert "RuntimeError" not in said


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_make_runs_all_tests_at_once_and_shows_the_ten_slowest(target: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={sys.prefix}"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    (line,) = [line for line in planned.splitlines() if "pytest" in line]
    assert "--durations 10" in line
    assert ("SSD_TEST_FULL=1" in line) == (target == "test-full")


def test_no_test_comes_near_its_limit(pytestconfig: pytest.Config) -> None:
    """A machine may be three times as busy as the one whose times are recorded."""
    recorded = json.loads(RECORDED.read_text())
    assert 3 * max(recorded.values()) < float(pytestconfig.getini("timeout"))


def test_a_file_has_the_tier_of_what_it_imports() -> None:
    tiers = {
        "target/scheduling/test_scheduler.py": PURE,
        "engine/sampling/test_sampler.py": TORCH,
        "gateway/test_openai_sdk.py": PROCESSES,  # by a conftest
        "repository/test_suite.py": PROCESSES,
    }
    assert {file: tier_of(ROOT / "tests" / file) for file in tiers} == tiers


def test_pure_tests_load_no_torch() -> None:
    said = "import sys, pytest; pytest.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", said, "-m", "pure", "--collect-only", "-qq"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False", done.stdout[-2000:]
