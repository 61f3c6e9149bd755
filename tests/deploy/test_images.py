"""The Dockerfile, read stage by stage: there is no engine to build it with in a test."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.checks.pods import IMAGES
from tests.deploy.manifests import OVERLAYS, manifests, pods
from tests.suite.tools import needs_tool
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
LAUNCHER = ROOT / "deploy" / "docker" / "triton_launcher.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = PYPROJECT["project"], PYPROJECT["tool"]
FINAL = {image.removeprefix("ssd-") for image in IMAGES}
INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "LABEL", "USER", "CMD"}


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [text for kind, text in self.steps if kind == instruction]


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    statements = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(kind, text.strip()) for kind, _, text in (s.partition(" ") for s in statements if s)]


def stages() -> dict[str, Stage]:
    found: list[Stage] = []
    for kind, text in instructions():
        if kind == "FROM":
            base, _, name = text.split()
            found.append(Stage(name, base))
        elif found:
            found[-1].steps.append((kind, text))
    return {each.name: each for each in found}


def lineage(name: str) -> list[Stage]:
    """A stage and those that it is made from, the first first."""
    known = stages()
    return [*lineage(known[name].base), known[name]] if name in known else []


def test_instructions_are_known_and_base_images_are_pinned_by_version() -> None:
    assert {kind for kind, _ in instructions()} <= INSTRUCTIONS
    (argument,) = [text for kind, text in instructions() if text.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-\w+", argument)
    known = stages()
    assert {each.base for each in known.values()} - known.keys() == {"${PYTHON}"}


@pytest.mark.parametrize("image", sorted(FINAL))
def test_an_image_has_what_it_needs_and_nothing_else(image: str) -> None:
    """A user with a number, a read-only root, no tool that builds, and what it says of itself."""
    line = lineage(image)
    run, copied, variables, (label,), (command,), arguments = (
        [text for stage in line for text in stage.of(kind)]
        for kind in ("RUN", "COPY", "ENV", "LABEL", "CMD", "ARG")
    )
    assert stages()[image].steps[-2] == ("USER", "10001:10001")
    assert not re.search(r"apt-get|\b(pip|uv|conda) (--\S+ )*install\b", " ".join(run))
    assert "pip uninstall" in " ".join(run)
    assert "builder" not in [stage.name for stage in line]
    assert not any(step.startswith("--from=builder") for step in copied)
    keys = ("title", "description", "licenses", "version", "revision")
    wanted = [f"org.opencontainers.image.{key}=" for key in keys]
    assert [each for each in (*wanted, PROJECT["description"]) if each not in label] == []
    settings = "PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp", "SSD_TARGET_KERNEL_CACHE=/var/cache/ssd"
    assert [each for each in settings if each not in " ".join(variables)] == []
    assert f"VERSION={PROJECT['version']}" in arguments
    assert json.loads(command)[0] in PROJECT["scripts"]


def test_users_and_commands_of_manifests_are_those_of_images() -> None:
    found = [pod for overlay in OVERLAYS for pod in pods(manifests(overlay))]
    assert {pod.spec["securityContext"]["runAsUser"] for pod in found} == {10001}
    commands = {container["command"][0] for pod in found for container in pod.containers()}
    assert commands <= PROJECT["scripts"].keys() | {"nvidia-cuda-mps-control"}


def test_copied_files_exist_and_are_part_of_the_context() -> None:
    copied = [text.split()[:-1] for stage in stages().values() for text in stage.of("COPY")]
    made = {first.removeprefix("--from=") for first, *_ in copied if first[:7] == "--from="}
    assert made <= stages().keys()
    named = {source for sources in copied if sources[0][:7] != "--from=" for source in sources}
    assert {source for source in named if not (ROOT / source).exists()} == set()
    assert {source for source in named if not in_context(source)} == set()
    assert not in_context(".git")
    assert not in_context("tests")


def in_context(path: str) -> bool:
    """By .dockerignore, whose last line that fits decides."""
    lines = [each for each in (ROOT / ".dockerignore").read_text().splitlines() if each[:1] != "#"]
    fit = [each for each in lines if fnmatch.fnmatch(path, each.removeprefix("!"))]
    return not fit or fit[-1].startswith("!")


def test_the_wheel_is_built_from_all_that_it_needs() -> None:
    copied = " ".join(stages()["builder"].of("COPY"))
    folders = [each.split("/")[0] for each in TOOLS["setuptools"]["packages"]["find"]["where"]]
    needed = [*folders, PROJECT["readme"], *PROJECT["license-files"]]
    assert [name for name in needed if name not in copied] == []


def test_torch_is_within_what_the_project_asks_for() -> None:
    """The image needs a torch whose Triton compiles nothing for a kernel's launch: 2.13."""
    from packaging.requirements import Requirement

    (ours,) = [r for e in PROJECT["optional-dependencies"]["serve"]
               if (r := Requirement(e)).name == "torch"]  # fmt: skip
    asked = re.findall(r'"(torch[^"]*)"', DOCKERFILE.read_text())
    assert len(asked) == 2
    for each in map(Requirement, asked):
        assert [v in each.specifier for v in ("2.13.0", "2.12.9")] == [True, False], each
    assert "2.13.0" in ours.specifier


@needs_tool("gcc")
def test_triton_launches_without_a_compiler_once_its_helper_is_there(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("gcc", "as", "ld"):
        (tools / name).symlink_to(os.path.realpath(shutil.which(name) or ""))
    variables = {
        "TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton"),
        "TRITON_LIBCUDA_PATH": str(tmp_path / "driver"),
    }
    without, made, found = (
        subprocess.run(
            [sys.executable, str(LAUNCHER), mode],
            env={**variables, "PATH": path},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        for mode, path in (("check", ""), ("compile", str(tools)), ("check", ""))
    )
    assert "would compile it" in without.stderr
    assert made.returncode == 0, made.stderr
    assert found.stdout.startswith("found: "), found.stderr
