"""The tests' own runner: nothing is lost between the process that collects and those that run."""

import subprocess
import sys
from pathlib import Path

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


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_forked_workers_tell_what_a_single_process_would(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_kinds.py").write_text(ALL_KINDS)
    (tmp_path / "test_more.py").write_text("def test_more(): pass\n" * 1)
    done = run(tmp_path, "--workers", "2", "-rA")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 4 passed, 1 skipped, 1 warning, 1 error" in done.stdout
    assert "as told" in done.stdout
    assert "the worker ended with exit code 3, in test_kinds.py::test_crashes" in done.stdout
    assert "be warned" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert (tmp_path / "made").read_text() == "xx"  # once more for what the crash had left


def test_the_first_failure_may_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_kinds.py").write_text(ALL_KINDS)
    done = run(tmp_path, "--workers", "2", "--exitfirst")
    assert done.returncode == 1 or done.returncode == 2
    assert "stopping after 1 failures" in done.stdout
    assert "test_crashes" not in done.stdout


def test_a_file_has_the_tier_of_what_it_imports() -> None:
    tests = ROOT / "tests"
    assert tier_of(tests / "target/scheduling/test_scheduler.py") == PURE
    assert tier_of(tests / "engine/sampling/test_sampler.py") == TORCH
    assert tier_of(tests / "gateway/test_openai_sdk.py") == PROCESSES  # by a conftest
    assert tier_of(Path(__file__)) == PROCESSES


def test_pure_tests_load_no_torch() -> None:
    said = "import sys, pytest; pytest.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", said, "-m", "pure", "--collect-only", "-qq"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False", done.stdout[-2000:]
