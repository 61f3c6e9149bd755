"""A section of the GPU benchmark that fails says so, and the command does."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.gpu import bench, report


def run_bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("rows", "code"), [([{"a": 1}], 0), ([{"a": 1}, {"a": 2, report.FAILED: "2 is odd"}], 1)]
)
def test_a_section_that_fails_is_written_and_has_an_exit_code(
    rows: report.Rows,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(bench.SECTIONS, "plain", lambda args: rows)
    assert run_bench(monkeypatch, "plain", "--out", str(tmp_path), "--commit", "x") == code
    assert json.loads((tmp_path / "plain.json").read_text())["rows"] == rows
    printed = capsys.readouterr().out
    assert "| a |" in printed
    assert ("plain failed: 2 is odd" in printed) == bool(code)


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0], 0), ([0, 1, 0], 1), ([0, 0, -9], 1)])
def test_of_several_sections_all_run_and_one_that_fails_is_enough(
    codes: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        ran.append(command[3])
        return SimpleNamespace(returncode=codes[len(ran) - 1])

    monkeypatch.setattr(subprocess, "run", run)
    assert run_bench(monkeypatch, "plain", "gap", "tree") == code
    assert ran == ["plain", "gap", "tree"]
