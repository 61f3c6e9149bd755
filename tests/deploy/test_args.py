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
    config_of,
    expanded,
    is_ours,
    ours,
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_flag_and_variable_is_known_to_its_program(overlay: str) -> None:
    found = [
        read(container)
        for pod in pods(manifests(overlay))
        for container in pod.containers()
        if is_ours(container)
    ]
    assert found
    assert [(each.program, each.unknown) for each in found if each.unknown] == []


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
def test_what_can_be_judged_here_is_accepted_in_every_overlay(tmp_path: Path) -> None:
    """With trial Secrets in place of those that a cluster would mount; models are judged, too,
    where they are those that are shipped."""
    secret_folder = write_secrets(tmp_path)
    for overlay in OVERLAYS:
        for pod, container, line in ours(manifests(overlay)):
            here = placed(pod, container, secret_folder)
            if overlay == "cpu":
                said = check_config(here)
                assert said.startswith(("ok: stories-", "ok: dns:///ssd-target-headless:7410"))
            elif line.serves:
                config = config_of(read(here))
                CHECKS[type(config)](config)
            elif line.command == "join" and not line.unknown:
                assert check_config(here).startswith("ok: node 1 of ssd-target-nodes-0.")


def placed(pod: Pod, container: Manifest, secret_folder: Path) -> Manifest:
    """The container, with files of this machine in its command line."""
    words = "\n".join(container["args"])
    for path, (secret, key) in secret_files(pod, container).items():
        words = words.replace(path, str(secret_folder / secret / key))
    return {**container, "args": words.split("\n")}


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
