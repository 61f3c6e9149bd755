"""The section on NCCL: its parts run apart, and are rehearsed on a CPU."""

import contextlib
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process_tree import is_alive
from tests.waiting import HANG_SECONDS, wait_until
from tools.gpu import nccl as section
from tools.gpu import nccl_parts
from tools.gpu.nccl import PARTS, Part, nccl, preloaded, run_part
from tools.gpu.nccl_parts import Place, answer_of, ranks_started
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


def test_the_section_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part hangs until its limit: what there is no time for is named."""
    now, limits = 0.0, {}

    def hangs(part: Part, *about: object) -> list[dict[str, Any]]:
        nonlocal now
        limits[part.name] = part.seconds
        now += part.seconds if part.name != "models" else 1.0
        return [{"part": part.name}]

    monkeypatch.setattr(section, "mps", contextlib.nullcontext)
    monkeypatch.setattr(section, "run_part", hangs)
    rows = nccl(None, clock=lambda: now)
    assert [row["part"] for row in rows] == [part.name for part in PARTS] == [*nccl_parts.PARTS]
    assert now <= section.SECTION_SECONDS
    assert min(limits.values()) >= section.LEAST_SECONDS
    late = [row for row in rows if FAILED in row]
    assert [row["part"] for row in late] == [part.name for part in PARTS[len(limits) :]]


def test_a_rank_that_fails_is_named_by_its_last_words_and_one_that_hangs_at_its_exit_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_parts, "EXIT_SECONDS", 0.0)
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with ranks_started(sys.exit, [("there is no GPU 7",)], tmp_path) as started:
        found = answer_of(started, answers, tmp_path)
    assert found == {FAILED: "rank 0 ended with code 1: there is no GPU 7"}
    answers.put({"found": 1})  # told before it hangs
    with ranks_started(time.sleep, [(1000,)], tmp_path) as started:
        assert answer_of(started, answers, tmp_path) == {"found": 1}
        assert started[0].is_alive()
    assert not started[0].is_alive()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert not any(FAILED in row for row in nccl_parts.models(folder, CPU))
    return folder


@pytest.mark.full  # services start, several times
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [part.name for part in PARTS if part.name != "models"])
def test_a_part_is_rehearsed_on_a_cpu(name: str, models: Path) -> None:
    found = list(nccl_parts.PARTS[name](models, CPU))  # type: ignore[call-arg]
    assert found
    assert not any(FAILED in row for row in found), found
    if name in ("2 ranks", "4 ranks"):
        assert found[-1]["says"] == f"rank {int(name[0]) - 1} died with exit code -9"
    if name == "plane":
        assert found[-2]["planes up"] == "2 tcp"
    if name == "features":
        assert found[-1]["planes up"] == "2 tcp"
        assert all(row["hits"] for row in found)
    if name == "all-reduce":
        assert [row["ranks"] for row in found] == [2, 4]
