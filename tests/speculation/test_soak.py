"""The soak prints what is left behind, and fails if anything is."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.soak.report import Trend, grown
from tools.soak.services import Figures

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1200
ENGINE = ("target", "engine")


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 30)
def test_nothing_is_lost_and_nothing_grows() -> None:
    command = [sys.executable, "-m", "tools.soak", "--minutes", "10"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was lost, nothing has grown" in ended.stdout


def test_memory_that_grows_is_told_from_memory_that_swings() -> None:
    leaking, swinging = Trend(), Trend()
    for second in range(300):
        leaking.add(second, 400 + second)
        swinging.add(second, 400 + 20 * (second % 2))
    assert leaking.grew
    assert not swinging.grew


def test_descriptors_and_threads_that_stay_are_named() -> None:
    before = {ENGINE: Figures(400.0, 20, 8, ("a",))}
    assert grown(before, {ENGINE: Figures(900.0, 20, 8, ("a",))}) == []
    files, threads = grown(before, {ENGINE: Figures(400.0, 90, 80, ("a", "b"))})
    assert files.startswith("target engine: 90 descriptors, 20 before")
    assert threads.startswith("target engine: 80 threads, 8 before")
