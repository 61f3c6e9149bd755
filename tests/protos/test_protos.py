"""The wire contract: lint-clean, compatible with what was promised, and its code up to date."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
IMAGE = PROTOS / "ssd.binpb"
RELEASED = ROOT / "tests/wire/released/ssd-v1-0.1.binpb"
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments: str, cwd: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BUF), *arguments], cwd=cwd, capture_output=True, text=True)


def test_the_contract_is_lint_clean() -> None:
    result = buf("lint")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("image", [IMAGE, RELEASED], ids=["committed", "released"])
def test_the_contract_keeps_what_was_promised(image: Path) -> None:
    result = buf("breaking", "--against", str(image))
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optional float top_p = 3;", ""),
        ("fixed64 seed = 2;", "string seed = 2;"),
        ("uint32 prompt_tokens = 3;", "uint32 prompt_tokens = 9;"),
    ],
)
def test_a_broken_promise_would_be_noticed(tmp_path: Path, old: str, new: str) -> None:
    copy = Path(shutil.copytree(PROTOS, tmp_path / "protos"))
    file = copy / "ssd/v1/target.proto"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert buf("breaking", "--against", str(IMAGE), cwd=copy).returncode != 0


def test_regenerating_the_code_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/generate_protos.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    fresh = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.py*"))
    assert fresh
    for path in fresh:
        assert (tmp_path / path).read_text() == (PROTOS / path).read_text(), path
