"""Kernels that were compiled once are not compiled again."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from ssd_engine.kernels.kernel_cache import OWN, SEED, VARIABLES, kept_binary, use_kernel_cache


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (OWN, SEED, *VARIABLES):
        monkeypatch.delenv(variable, raising=False)


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN, str(tmp_path))
    compiler = Mock(side_effect=[b"one", b"two"])
    first = kept_binary("kernel", "shape 1", compiler)
    assert kept_binary("kernel", "shape 1", compiler) == first
    assert kept_binary("kernel", "shape 2", compiler) != first


def test_a_place_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "helper.so").write_bytes(b"built")
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv(SEED, str(tmp_path / "seed"))
    use_kernel_cache(blocked / "cache")
    assert "cannot be put into" in caplog.text
    monkeypatch.setenv(OWN, str(blocked))
    compiler = Mock(side_effect=[b"one", b"two"])
    assert [kept_binary("kernel", "shape", compiler) for _ in range(2)] == [b"one", b"two"]


def test_every_library_that_compiles_is_told_its_place_unless_an_operator_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    use_kernel_cache(tmp_path)
    places = {variable: Path(os.environ[variable]) for variable in VARIABLES}
    assert places.pop("TRITON_CACHE_DIR") == Path("/elsewhere")
    assert len(set(places.values())) == len(places)
    assert all(place.parent == tmp_path for place in places.values())


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
