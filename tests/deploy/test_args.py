"""What manifests say to our programs is read by these programs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ssd_draft.config import DraftConfig
from ssd_draft.config import check_config as check_draft
from ssd_gateway.config import GatewayConfig, check_gateway
from ssd_target.config import TargetConfig
from ssd_target.config import check_config as check_target
from tests.deploy.checks.references import secret_files
from tests.deploy.command_lines import (
    PROGRAMS,
    CommandLine,
    config_of,
    expanded,
    is_ours,
    read,
)
from tests.deploy.manifests import OVERLAYS, Manifest, Pod, manifests, named, pods
from tests.deploy.trial_secrets import write_secrets
from tests.suite.tools import needs_tool

ROOT = Path(__file__).resolve().parents[2]
CHECKS: dict[type, Callable[[Any], None]] = {
    TargetConfig: check_target,
    DraftConfig: check_draft,
    GatewayConfig: check_gateway,
}


def lines(overlay: str) -> list[CommandLine]:
    found = [
        read(container)
        for pod in pods(manifests(overlay))
        for container in pod.containers()
        if is_ours(container)
    ]
    assert found
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_flag_and_variable_is_known_to_its_program(overlay: str) -> None:
    assert [(each.program, each.unknown) for each in lines(overlay) if each.unknown] == []


def test_a_flag_that_a_program_does_not_have_is_noticed() -> None:
    container: Manifest = {
        "command": ["ssd-draft"],
        "args": ["serve", "--no-such-flag=1", "--depth=4"],
        "env": [{"name": "SSD_DRAFT_NO_SUCH", "value": "1"},
                {"name": "SSD_DRAFT_MODEL", "value": "stories-draft"}],
    }  # fmt: skip
    line = read(container)
    assert line.unknown == ("--no-such-flag", "SSD_DRAFT_NO_SUCH")
    assert (line.options["depth"], line.options["model"]) == (4, "stories-draft")
    assert read({**container, "args": ["no-such-command"]}).unknown == ("no-such-command",)


@needs_tool("openssl")
def test_the_cpu_overlay_passes_check_config(tmp_path: Path) -> None:
    """With trial Secrets in place of those that a cluster would mount."""
    secret_folder = write_secrets(tmp_path)
    for pod in pods(manifests("cpu")):
        for container in pod.spec["containers"]:
            said = check_config(placed(pod, container, secret_folder))
            assert said.startswith(("ok: stories-", "ok: dns:///ssd-target-headless:7410"))


@needs_tool("openssl")
def test_what_can_be_judged_without_a_model_is_accepted_in_every_overlay(tmp_path: Path) -> None:
    secret_folder = write_secrets(tmp_path)
    for overlay in OVERLAYS:
        for pod in pods(manifests(overlay)):
            for container in filter(is_ours, pod.spec["containers"]):
                here = placed(pod, container, secret_folder)
                line = read(here)
                if line.serves:
                    config = config_of(line)
                    CHECKS[type(config)](config)
                elif line.command == "join" and not line.unknown:
                    assert check_config(here).startswith("ok: node 1 of ssd-target-nodes-0.")


def placed(pod: Pod, container: Manifest, secret_folder: Path) -> Manifest:
    """The container, with files of this machine in its command line."""

    def here(argument: str) -> str:
        for path, (secret, key) in secret_files(pod, container).items():
            argument = argument.replace(path, str(secret_folder / secret / key))
        return argument

    return {**container, "args": [here(each) for each in container["args"]]}


def check_config(container: Manifest) -> str:
    arguments = [*map(expanded, container["args"]), "--check-config"]
    variables = {each["name"]: each["value"] for each in container.get("env", ())}
    program = PROGRAMS[container["command"][0]]
    result = CliRunner().invoke(program, arguments, env=variables)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[-1]


def test_drafts_are_scaled_by_a_metric_that_they_have() -> None:
    scaler = named(manifests("gpu"), "HorizontalPodAutoscaler", "ssd-draft")
    (metric,) = scaler["spec"]["metrics"]
    sources = (ROOT / "services").rglob("*.py")
    said = {name for file in sources for name in re.findall(r'"(ssd_\w+)"', file.read_text())}
    assert metric["pods"]["metric"]["name"] in said
