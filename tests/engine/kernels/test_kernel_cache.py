"""Kernels that were compiled once are not compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_engine.kernels.kernel_cache import OWN, SEED, VARIABLES, kept_binary, use_kernel_cache


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (OWN, SEED, *VARIABLES):
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
        "import os, pathlib, sys; from ssd_engine.kernels.kernel_cache import *;"
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


def test_what_an_image_was_built_with_is_put_into_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, cache = tmp_path / "seed", tmp_path / "cache"
    for name in ("one", "two"):
        (seed / "triton" / name).mkdir(parents=True)
        (seed / "triton" / name / "helper.so").write_bytes(b"built")
    (cache / "triton" / "two").mkdir(parents=True)
    (cache / "triton" / "two" / "helper.so").write_bytes(b"newer")
    monkeypatch.setenv(SEED, str(seed))
    use_kernel_cache(cache)
    assert (cache / "triton" / "one" / "helper.so").read_bytes() == b"built"
    assert (cache / "triton" / "two" / "helper.so").read_bytes() == b"newer"
    assert len([each for each in cache.rglob("*") if each.is_file()]) == 2


def test_a_cache_that_cannot_be_written_to_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "helper.so").write_bytes(b"built")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(SEED, str(tmp_path / "seed"))
    use_kernel_cache(tmp_path / "file" / "cache")
    assert "cannot be put into" in caplog.text
