"""What we depend on: bounded, accounted for, and audited where the data for it can be had."""

import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.suite.tools import give_up
from tools.sbom import Missing, applies, closure, make_bom
from tools.sbom import main as write_bill

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = ROOT / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Their names say what they are for.
PLAIN = {"pytest", "ruff", "mypy", "types-protobuf", "pyyaml"}
VULNERABILITIES = "https://pypi.org/pypi/click/8.1.8/json"  # where pip-audit looks, for one package
# A package of requirements alone, of newer versions of torch.
WITHOUT_LICENCE = {"cuda-toolkit"}


def declared(group: str) -> list[str]:
    requirements: list[str] = PROJECT["dependencies"] if group == "base" else EXTRAS[group]
    return requirements


ALL = [each for group in ("base", *EXTRAS) for each in declared(group)]


def test_a_dependency_has_a_lower_and_an_upper_bound() -> None:
    for text in ALL:
        bounds = {each.operator for each in Requirement(text).specifier}
        assert bounds in ({">=", "<"}, {"=="}), text


def test_a_dependency_has_a_reason() -> None:
    """Of its own, or of its kin above it."""
    given = ""
    for line in PYPROJECT.read_text().splitlines():
        found = next((text for text in ALL if line.startswith(f'    "{text}",')), None)
        if found is not None and Requirement(found).name not in PLAIN:
            kin = Requirement(found).name.split("-")[0]
            given = kin if " # " in line else given
            assert given == kin, found


def test_what_is_installed_here_is_within_the_bounds() -> None:
    for group in ("base", "serve", "dev"):
        for each in map(Requirement, declared(group)):
            if applies(each, ()):
                assert each.specifier.contains(metadata.version(each.name), prereleases=True), each


def test_the_torch_that_make_installs_is_one_of_those_that_users_may_have() -> None:
    """Theirs may be newer: 2.15 was tried."""
    (line,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made, allowed = (
        Requirement(line),
        next(r for r in map(Requirement, EXTRAS["serve"]) if r.name == "torch"),
    )
    lower, upper = sorted(Version(each.version) for each in made.specifier)
    assert allowed.specifier.contains(lower)
    assert allowed.specifier.contains("2.15.0")
    assert upper <= max(Version(each.version) for each in allowed.specifier)


# --- the bill of materials ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bill") / "sbom.json"
    write_bill(["--out", str(file)])
    from cyclonedx.validation.json import JsonStrictValidator  # its import takes seconds

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read_text()) is None
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def packages(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in bill["components"]}


def test_the_bill_says_what_each_package_is(bill: dict[str, Any]) -> None:
    assert bill["metadata"]["component"]["name"] == PROJECT["name"]
    assert bill["metadata"]["component"]["version"] == PROJECT["version"]
    for name, each in packages(bill).items():
        assert each["version"] == metadata.version(name)
        assert each["purl"].startswith(f"pkg:pypi/{name}@"), each
        assert "licenses" in each or name in WITHOUT_LICENCE, f"{name} states no licence"


def test_the_bill_is_complete(bill: dict[str, Any]) -> None:
    """Whatever a package of the bill needs on this machine is in the bill, too."""
    listed = packages(bill)
    for text in (*declared("base"), *declared("serve")):
        assert canonicalize_name(Requirement(text).name) in listed
    for name in listed:
        for each in map(Requirement, metadata.requires(name) or ()):
            if applies(each, ()):
                assert canonicalize_name(each.name) in listed, f"{name} needs {each.name}"


def test_the_bill_has_nothing_that_is_not_shipped(bill: dict[str, Any]) -> None:
    own = {canonicalize_name(Requirement(text).name) for text in declared("dev")}
    shipped = {
        canonicalize_name(Requirement(t).name) for g in ("base", "serve") for t in declared(g)
    }
    needed = closure([*declared("base"), *declared("serve")])
    assert set(packages(bill)) == set(needed)
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & set(packages(bill))
    assert own - shipped - set(needed)


def test_dependencies_of_packages_are_in_the_bill(bill: dict[str, Any]) -> None:
    edges = {each["ref"]: set(each.get("dependsOn", ())) for each in bill["dependencies"]}
    grpc = packages(bill)["grpcio-status"]["bom-ref"]
    assert {ref.partition("@")[0] for ref in edges[grpc]} == {
        "grpcio", "protobuf", "googleapis-common-protos"}  # fmt: skip


def test_a_package_that_is_not_installed_is_an_error_and_not_left_out() -> None:
    with pytest.raises(Missing, match="no-such-package-anywhere is not installed"):
        closure(["no-such-package-anywhere>=1,<2"])
    assert make_bom([]).components


def test_the_bill_has_a_command() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "sbom", f"VENV={sys.prefix}"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert "-m tools.sbom --out build/sbom.json" in planned


# --- known vulnerabilities ------------------------------------------------------------------------


def has_data() -> bool:
    try:
        with urllib.request.urlopen(VULNERABILITIES, timeout=5) as answer:
            return "vulnerabilities" in json.load(answer)
    except (OSError, ValueError):
        return False


def test_no_package_has_a_known_vulnerability(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Where the data cannot be had, bounds and the bill are what there is."""
    if not has_data():
        give_up(request.node, "pip-audit's data", full=False, why="pypi.org does not answer")
    pinned = tmp_path / "requirements.txt"
    needed = closure([*declared("base"), *declared("serve")])
    lines = [f"{name}=={Version(metadata.version(name)).public}\n" for name in sorted(needed)]
    pinned.write_text("".join(lines))
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--format", "json",
               "--no-deps", "--disable-pip", "--requirement", str(pinned)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    found = json.loads(done.stdout)["dependencies"]
    assert {each["name"]: each["vulns"] for each in found if each.get("vulns")} == {}
    assert done.returncode == 0, done.stderr
