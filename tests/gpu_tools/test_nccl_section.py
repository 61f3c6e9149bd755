"""The section on NCCL: its parts run apart, and are rehearsed on a CPU."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process_tree import is_alive
from tests.waiting import HANG_SECONDS, wait_until
from tools.gpu import nccl as section
from tools.gpu import nccl_parts
from tools.gpu.nccl import PARTS, Part, nccl, preloaded, run_part
from tools.gpu.nccl_parts import Place
from tools.gpu.report import FAILED

TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=4200,
    max_position_embeddings=2048,
)
CPU = Place("cpu", "tcp", TINY)

WRITES = "open(sys.argv[1] + '/a part.jsonl', 'w').write('{\"found\": 1}\\n')"
STARTS_ANOTHER = """
child = subprocess.Popen(["sleep", "1000"])
open(sys.argv[1] + "/child", "w").write(f"{child.pid}\\n")
"""


def ran(folder: Path, program: str, seconds: float = HANG_SECONDS) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", f"import subprocess, sys, time\n{program}", str(folder)]
    return run_part(Part("a part", seconds), command, folder, os.environ)


def test_a_part_that_is_done_gives_its_rows(tmp_path: Path) -> None:
    assert ran(tmp_path, WRITES) == [{"part": "a part", "found": 1}]


def test_a_part_that_fails_keeps_what_it_has_found(tmp_path: Path) -> None:
    rows = ran(tmp_path, f"{WRITES}\nsys.exit(3)")
    assert rows == [
        {"part": "a part", "found": 1},
        {"part": "a part", FAILED: "a part: exit code 3"},
    ]


def test_a_part_that_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    rows = ran(tmp_path, f"{STARTS_ANOTHER}\ntime.sleep(1000)", seconds=3)
    assert rows == [{"part": "a part", FAILED: "a part: not done after 3 s"}]
    child = tmp_path / "child"
    if child.exists():  # not on a machine that took longer than that to begin
        pid = int(child.read_text())
        wait_until(lambda: not is_alive(pid))


def test_a_library_is_taken_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libnccl.so.2"
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert preloaded(library)["LD_PRELOAD"] == str(library)
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert preloaded(library)["LD_PRELOAD"] == f"{library}:/lib/other.so"
    assert preloaded(None)["LD_PRELOAD"] == "/lib/other.so"
    assert nccl(library)[0][FAILED] == f"--nccl: there is no file {library}"


def test_without_ranks_that_share_a_gpu_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def refused(part: Part, *about: object) -> list[dict[str, Any]]:
        tried.append(part.name)
        return [{FAILED: "NCCL 2.28.9 does not allow that"}]

    monkeypatch.setattr(section, "run_part", refused)
    assert nccl(None) == [{FAILED: "NCCL 2.28.9 does not allow that"}]
    assert tried == ["models"]


def test_every_part_can_be_run() -> None:
    assert [part.name for part in PARTS] == list(nccl_parts.PARTS)


@pytest.mark.full  # services start, several times
def test_the_parts_are_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    rows = {
        name: list(nccl_parts.PARTS[name](tmp_path, CPU))  # type: ignore[call-arg]
        for name in ("models", "float32", "2 ranks", "plane")
    }
    for name, found in rows.items():
        assert found, name
        assert not any(FAILED in row for row in found), found
    assert rows["2 ranks"][-1]["says"] == "rank 1 died with exit code -9"
    assert rows["plane"][-2]["planes up"] == "2 tcp"
