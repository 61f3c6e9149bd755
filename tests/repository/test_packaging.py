"""What an installation gives, in an environment of its own."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.client.scripted_target import full_text, serve
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("protos", "services", "client", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pip install .`` without extras; returns the environment's bin folder."""
    folder = tmp_path_factory.mktemp("thin")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    subprocess.run([binaries / "pip", "install", "--quiet", str(source)], check=True, timeout=600)
    return binaries


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, cwd="/")


@pytest.mark.full
def test_the_base_install_is_a_working_client_without_torch(thin: Path) -> None:
    for absent in ("torch", "transformers", "numpy"):
        assert run(thin / "python", "-c", f"import {absent}").returncode != 0
    client = (thin / "ssd-client", "generate", "Once upon a time", "--max-tokens", "20")
    with serve() as server:
        result = run(*client, "--target", server.address)
    assert (result.returncode, result.stdout) == (0, full_text(20) + "\n"), result.stderr
    assert "20 tokens" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ("ssd-client", "generate", "--local", "Once"),
        ("ssd-target", "serve", "stories-draft"),
        ("ssd-draft", "serve", "stories-draft"),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    thin: Path, command: tuple[str, ...]
) -> None:
    program, *arguments = command
    result = run(thin / program, *arguments)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert 'pip install "ssd-serve[serve]"' in last
    needs = f'error: {program} needs the extra "serve": pip install "ssd-serve[serve]"'
    assert (last, result.returncode) == (needs, 2) or program == "ssd-client"


@pytest.mark.full
def test_the_shipped_pair_is_inside_the_package_and_small(thin: Path) -> None:
    library = next(thin.parent.glob("lib/python*/site-packages/ssd_engine/shipped"))
    size = sum(file.stat().st_size for file in library.rglob("*") if file.is_file())
    names = {"stories-target", "stories-draft", "stories-eagle"}
    assert {p.name for p in library.iterdir()} >= names
    assert size <= 28e6


def test_this_interpreter_has_the_versions_that_pyproject_asks_for() -> None:
    assert run(sys.executable, "-m", "pip", "check").returncode == 0


WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import ssd_draft.cli, ssd_target.cli
"""


def test_the_commands_of_servers_need_no_extra_until_they_serve() -> None:
    absent = {"jinja2", "llguidance", "msgspec", "numpy", "prometheus_client", "safetensors",
              "tokenizers", "torch", "transformers"}  # fmt: skip
    result = run(sys.executable, "-c", WITHOUT_EXTRAS.format(absent=absent))
    assert result.returncode == 0, result.stderr
