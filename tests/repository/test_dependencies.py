"""What we depend on: bounded, accounted for, and audited where the data for it can be had."""

import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable
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


SHIPPED = [*PROJECT["dependencies"], *EXTRAS["serve"]]
ALL = [*PROJECT["dependencies"], *(each for group in EXTRAS.values() for each in group)]


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_a_dependency_has_a_lower_and_an_upper_bound() -> None:
    bounds = {text: {each.operator for each in Requirement(text).specifier} for text in ALL}
    assert [text for text, found in bounds.items() if found not in ({">=", "<"}, {"=="})] == []


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
    asked = [each for each in map(Requirement, SHIPPED + EXTRAS["dev"]) if applies(each, ())]
    here = {each: metadata.version(each.name) for each in asked}
    wrong = [each for each in asked if not each.specifier.contains(here[each], prereleases=True)]
    assert wrong == []


def test_the_torch_that_make_installs_is_one_of_those_that_users_may_have() -> None:
    """Theirs may be newer: 2.15 was tried."""
    (line,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (allowed,) = [each for each in map(Requirement, SHIPPED) if each.name == "torch"]
    lower, upper = sorted(Version(each.version) for each in Requirement(line).specifier)
    assert all(allowed.specifier.contains(each) for each in (lower, "2.15.0"))
    assert upper <= max(Version(each.version) for each in allowed.specifier)


# --- the bill of materials ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("bill") / "sbom.json"
    write_bill(["--out", str(file)])
    from cyclonedx.validation.json import JsonStrictValidator  # its import takes seconds

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read_text()) is None
    return json.loads(file.read_text())


def test_the_bill_says_what_each_package_is(bill: dict[str, Any]) -> None:
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"]) == (PROJECT["name"], PROJECT["version"])
    for each in bill["components"]:
        assert each["version"] == metadata.version(each["name"])
        assert each["purl"].startswith(f"pkg:pypi/{each['name']}@"), each
        assert "licenses" in each or each["name"] in WITHOUT_LICENCE, each


def test_the_bill_is_complete_and_has_nothing_that_is_not_shipped(bill: dict[str, Any]) -> None:
    """Whatever a package of the bill needs on this machine is in the bill, too."""
    listed = {each["name"]: each["bom-ref"] for each in bill["components"]}
    assert listed.keys() == set(closure(SHIPPED)) >= names(SHIPPED)
    for name in listed:
        asked = [each for each in metadata.requires(name) or () if applies(Requirement(each), ())]
        assert names(asked) <= listed.keys(), name
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & listed.keys()
    edges = {each["ref"]: each.get("dependsOn", ()) for each in bill["dependencies"]}
    found = {ref.partition("@")[0] for ref in edges[listed["grpcio-status"]]}
    assert found == {"grpcio", "protobuf", "googleapis-common-protos"}


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
    versions = {name: Version(metadata.version(name)).public for name in closure(SHIPPED)}
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    flags = ("--progress-spinner", "off", "--format", "json", "--no-deps", "--disable-pip")
    command = [sys.executable, "-m", "pip_audit", *flags, "--requirement", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    found = {each["name"]: each.get("vulns") for each in json.loads(done.stdout)["dependencies"]}
    assert {name: known for name, known in found.items() if known} == {}
    assert done.returncode == 0, done.stderr
