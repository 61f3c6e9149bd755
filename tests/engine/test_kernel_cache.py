"""Kernels that were compiled once are not compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_engine.kernel_cache import OWN, VARIABLES, kept_binary, use_kernel_cache


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (OWN, *VARIABLES):
        monkeypatch.delenv(variable, raising=False)


class Compiler:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> bytes:
        self.runs += 1
        return b"binary %d" % self.runs


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN, str(tmp_path))
    compiler = Compiler()
    first = kept_binary("kernel", "shape 1", compiler)
    assert kept_binary("kernel", "shape 1", compiler) == first
    assert kept_binary("kernel", "shape 2", compiler) != first
    assert compiler.runs == 2


def test_a_place_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv(OWN, str(blocked))
    compiler = Compiler()
    kept_binary("kernel", "shape", compiler)
    kept_binary("kernel", "shape", compiler)
    assert compiler.runs == 2


def test_every_library_that_compiles_is_told_its_place(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from ssd_engine.kernel_cache import *;"
        "use_kernel_cache(pathlib.Path(sys.argv[1])); print(*(os.environ[v] for v in VARIABLES))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    places = done.stdout.split()
    assert len(set(places)) == len(VARIABLES)
    assert all(Path(place).parent == tmp_path for place in places)


def test_what_an_operator_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, os.environ.get(variable, "/own"))
    use_kernel_cache(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
