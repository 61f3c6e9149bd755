"""The soak as a command: a few seconds by default, ten minutes in full."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import FULL

ROOT = Path(__file__).resolve().parents[2]
# Seven clients: nobody has to be one that never reads, for which a server takes its time.
FLAGS = ["--minutes", "10"] if FULL else ["--minutes", "0.05", "--pool", "6", "--clients", "7"]
SECONDS = 1200 if FULL else 270


@pytest.mark.timeout(SECONDS + 30)
def test_nothing_is_lost_and_nothing_grows() -> None:
    command = [sys.executable, "-m", "tools.soak", *FLAGS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was lost, nothing has grown" in ended.stdout
