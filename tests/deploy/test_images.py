"""The Dockerfile, read stage by stage: there is no engine to build it with in a test."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.checks.pods import IMAGES
from tests.deploy.manifests import OVERLAYS, manifests, pods
from tests.suite.tools import needs_tool

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
LAUNCHER = ROOT / "deploy" / "docker" / "triton_launcher.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FINAL = {image.removeprefix("ssd-") for image in IMAGES}
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "LABEL", "USER", "CMD"}


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [text for kind, text in self.steps if kind == instruction]


def instructions() -> Iterator[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    for statement in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if statement.strip():
            kind, _, text = statement.partition(" ")
            yield kind, text.strip()


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for kind, text in instructions():
        if kind == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", text).groups()  # type: ignore[union-attr]
            found[name] = stage = Stage(name, base)
        elif found:
            stage.steps.append((kind, text))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and those that it is made from, the first last."""
    known, line = stages(), []
    while name in known:
        line.append(known[name])
        name = known[name].base
    return line


def steps(name: str, kind: str) -> list[str]:
    return [text for stage in reversed(lineage(name)) for text in stage.of(kind)]


def test_every_instruction_is_one_that_these_tests_look_at() -> None:
    assert {kind for kind, _ in instructions()} <= INSTRUCTIONS


def test_base_images_are_pinned_by_version() -> None:
    (argument,) = [text for kind, text in instructions() if text.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+", argument)
    known = stages()
    assert {each.base for each in known.values()} - known.keys() == {"${PYTHON}"}


@pytest.mark.parametrize("image", sorted(FINAL))
def test_an_image_runs_as_a_user_with_a_number(image: str) -> None:
    last = stages()[image].steps[-2:]
    assert last[0] == ("USER", "10001:10001")
    used = {each["securityContext"]["runAsUser"] for o in OVERLAYS for p in pods(manifests(o))
            for each in [p.spec]}  # fmt: skip
    assert used == {10001}


@pytest.mark.parametrize("image", sorted(FINAL))
def test_no_build_tool_is_left_in_an_image(image: str) -> None:
    run = " ".join(steps(image, "RUN"))
    assert "apt-get" not in run
    assert not re.search(r"\b(pip|uv|conda) (--\S+ )*install\b", run)
    assert "pip uninstall" in run
    assert not any(step.startswith("COPY --from=builder") for step in steps(image, "COPY"))
    assert "builder" not in [stage.name for stage in lineage(image)]


@pytest.mark.parametrize("image", sorted(FINAL))
def test_an_image_suits_a_read_only_root(image: str) -> None:
    variables = " ".join(steps(image, "ENV"))
    assert "PYTHONDONTWRITEBYTECODE=1" in variables
    assert "HOME=/tmp" in variables
    assert "SSD_TARGET_KERNEL_CACHE=/var/cache/ssd" in variables


@pytest.mark.parametrize("image", sorted(FINAL))
def test_an_image_says_what_it_is(image: str) -> None:
    (label,) = steps(image, "LABEL")
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in label
    assert f"VERSION={PROJECT['version']}" in steps(image, "ARG")
    assert PROJECT["description"] in label


@pytest.mark.parametrize("image", sorted(FINAL))
def test_commands_of_images_and_manifests_are_installed(image: str) -> None:
    (command,) = steps(image, "CMD")
    assert json.loads(command)[0] in PROJECT["scripts"]
    drivers = {"nvidia-cuda-mps-control"}
    for overlay in OVERLAYS:
        for pod in pods(manifests(overlay)):
            for container in pod.containers():
                assert container["command"][0] in PROJECT["scripts"].keys() | drivers


def test_copied_files_exist_and_are_part_of_the_context() -> None:
    copied = [text.split() for stage in stages().values() for text in stage.of("COPY")]
    for *sources, _ in copied:
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages()
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert in_context(source), f".dockerignore leaves {source} out"
    assert not in_context(".git")
    assert not in_context("tests")


def in_context(path: str) -> bool:
    """By .dockerignore, whose last line that fits decides."""
    inside = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatch(path, pattern):
            inside = line.startswith("!")
    return inside


def test_the_wheel_is_built_from_all_that_it_needs() -> None:
    copied = " ".join(stages()["builder"].of("COPY"))
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for folder in setuptools["packages"]["find"]["where"]:
        assert folder.split("/")[0] in copied
    for name in (PROJECT["readme"], *PROJECT["license-files"]):
        assert name in copied


def test_torch_is_within_what_the_project_asks_for() -> None:
    """The image needs a torch whose Triton compiles nothing for a kernel's launch: 2.13."""
    from packaging.requirements import Requirement

    (ours,) = [r for e in PROJECT["optional-dependencies"]["serve"]
               if (r := Requirement(e)).name == "torch"]  # fmt: skip
    asked = re.findall(r'"(torch[^"]*)"', DOCKERFILE.read_text())
    assert len(asked) == 2
    for each in asked:
        assert "2.13.0" in Requirement(each).specifier
        assert "2.13.0" in ours.specifier
        assert "2.12.9" not in Requirement(each).specifier


def test_triton_compiles_nothing_else() -> None:
    """Before 3.7 it also compiled a launcher for every kernel."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    source = (Path(nvidia.__file__).parent / "driver.py").read_text()
    assert len(re.findall(r"compile_module_from_\w+\(", source)) == 1


def launcher(mode: str, path: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        "TRITON_LIBCUDA_PATH": str(folder / "driver"),
        "PATH": path,
    }
    command = [sys.executable, str(LAUNCHER), mode]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


@needs_tool("gcc")
def test_triton_launches_without_a_compiler_once_its_helper_is_there(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("gcc", "as", "ld"):
        (binaries / name).symlink_to(os.path.realpath(shutil.which(name) or ""))
    without = launcher("check", "", tmp_path)
    assert "would compile it" in without.stderr
    made = launcher("compile", str(binaries), tmp_path)
    assert made.returncode == 0, made.stderr
    found = launcher("check", "", tmp_path)
    assert found.stdout.startswith("found: "), found.stderr
