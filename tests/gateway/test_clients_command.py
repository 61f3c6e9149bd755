"""`make test-clients` tries clients of others, and tells which of them failed and why."""

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools.clients.__main__ import Row, run, tried
from tools.clients.environments import STAMP, install, package_name, variables_of
from tools.clients.table import CLIENTS, SCRIPTS, Client

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"scenarios.py", "scenarios.mjs", "trip.py"}
NOWHERE = "http://127.0.0.1:1"


def bounds(package: str) -> set[str]:
    """Of ``openai>=3,<4`` for Python, or ``openai@>=6 <8`` for Node."""
    _, at, versions = package.rpartition("@")
    found = SpecifierSet(",".join(versions.split())) if at else Requirement(package).specifier
    return {each.operator for each in found}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda each: each.name)
def test_a_client_has_a_script_a_reason_and_bounded_versions(client: Client) -> None:
    assert client.path.is_file()
    assert client.why
    assert all(bounds(package) == {">=", "<"} for package in client.packages)


def test_every_script_is_a_clients_and_every_client_is_in_the_docs() -> None:
    there = {each.name for each in SCRIPTS.iterdir() if each.suffix in (".py", ".mjs")}
    assert there - SHARED == {client.script for client in CLIENTS}
    section = (ROOT / "docs/testing.md").read_text().partition("## Clients of others")[2]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == [client.name for client in CLIENTS]


def test_names_of_packages_in_both_registries() -> None:
    told = ("litellm[mcp]>=1,<2", "@ai-sdk/openai-compatible@>=2 <4")
    assert [*map(package_name, told)] == ["litellm", "@ai-sdk/openai-compatible"]


def test_only_the_gateway_is_told_to_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a real one")
    variables = variables_of(NOWHERE, Path("tokenizer"))
    assert variables["SSD_URL"] == f"{NOWHERE}/v1"
    assert not [name for name in variables if name.startswith("OPENAI_")]


def scripted(folder: Path, text: str) -> tuple[Client, Path]:
    """A client whose script is this text, in an environment that needs nothing installed."""
    script = folder / "script.py"
    script.write_text(text)
    client = Client("scripted", str(script), (), "for the test")
    place = folder / client.name
    (place / "bin").mkdir(parents=True)
    (place / "bin/python").symlink_to(sys.executable)
    (place / STAMP).write_text(json.dumps(client.packages))
    return client, place


def test_an_environment_is_kept_while_its_packages_are_the_same(tmp_path: Path) -> None:
    client, place = scripted(tmp_path, "")
    assert install(client, tmp_path) == place


SCENARIOS = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import scenarios

@scenarios.scenario("good")
def good(): pass

@scenarios.scenario("bad")
async def bad(): scenarios.check(1 > 2, "the sum")

scenarios.main()
"""


def test_each_scenario_tells_how_it_ended(tmp_path: Path) -> None:
    (good, no_error), (bad, error) = run(*scripted(tmp_path, SCENARIOS), NOWHERE)
    assert (good, no_error, bad) == ("good", "", "bad")
    assert "AssertionError: not as it should be: 'the sum'" in error


@pytest.mark.parametrize("text", ["raise SystemExit('no such package')", "pass"])
def test_a_script_that_tells_nothing_has_failed(tmp_path: Path, text: str) -> None:
    ((name, error),) = run(*scripted(tmp_path, text), NOWHERE)
    assert name == "its script"
    assert ("no such package" in error) == ("no such" in text)


def test_a_client_that_cannot_be_installed_has_failed(tmp_path: Path) -> None:
    client = Client("lost", "openai_sdk.mjs", ("no/such/package@>=1 <2",), "for the test")
    (row,) = tried(client, tmp_path, NOWHERE)
    assert row == Row("lost", "", "install", row.error)
    assert row.error
