"""docs/deploy.md says what the files say."""

import re
import shlex
from pathlib import Path

from tests.deploy.command_lines import is_ours, listening, read
from tests.deploy.manifests import OVERLAYS, manifests, named, of_kind, parse, pods
from tests.deploy.needs import SECRETS
from tests.deploy.test_images import stages

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "deploy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_path_exists() -> None:
    paths = re.findall(r"\b(?:deploy|tests|docs|tools)/[\w./-]*[\w/]", TEXT)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_overlays_and_components_are_all_named() -> None:
    assert sorted(codes(row[0])[0] for row in rows("Overlays")) == OVERLAYS
    (line,) = [each for each in section("Overlays").splitlines() if each.startswith("Of `")]
    folders = sorted(each.name for each in (ROOT / "deploy" / "components").iterdir())
    assert sorted(codes(line)[1:]) == folders


def test_secrets_are_those_that_pods_mount() -> None:
    said = {codes(row[0])[0]: frozenset(codes(row[1])) for row in rows("What you provide")}
    assert said == SECRETS


def test_ports_are_those_that_processes_listen_on() -> None:
    said = set()
    for row in rows("Ports"):
        low, _, high = row[0].partition("–")
        said.add(range(int(low), int(high or low) + 1))
    listened = {
        place.ports
        for overlay in OVERLAYS
        for pod in pods(manifests(overlay))
        for container in pod.spec["containers"]
        if is_ours(container)
        for place in listening(read(container))
    }
    assert listened <= said
    opened = {
        range(port["port"], port.get("endPort", port["port"]) + 1)
        for policy in of_kind(manifests("multi-node"), "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for port in rule["ports"]
    }
    assert said == listened | opened


def test_commands_name_what_is_there() -> None:
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    targets = [c[c.index("--target") + 1] for c in commands if c[:2] == ["docker", "build"]]
    assert targets == ["cpu", "gateway", "client"]
    assert set(targets) <= stages().keys()
    (applied,) = [c[-1] for c in commands if c[:3] == ["kubectl", "apply", "-k"]]
    assert Path(applied).name in OVERLAYS
    named(manifests("smoke-test"), "Job", "ssd-smoke-test")
    assert TEXT.count("job/ssd-smoke-test") == 2
    for kind, called in re.findall(r"(statefulset|deployment)/([\w-]+)", TEXT):
        named(manifests("gpu"), {"statefulset": "StatefulSet"}.get(kind, "Deployment"), called)


def test_examples_are_yaml_with_names_that_exist() -> None:
    overlay, adapter = (parse(block)[0] for block in blocks("yaml"))
    for path in (*overlay["resources"], *overlay["components"]):
        assert (ROOT / path.removeprefix("ssd/")).exists()
    scaler = named(manifests("gpu"), "HorizontalPodAutoscaler", "ssd-draft")
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert adapter["rules"]["custom"][0]["name"]["as"] == metric


def test_times_and_numbers_are_those_of_the_manifests() -> None:
    objects = manifests("gpu")
    drains = {
        read(c).program: read(c).options["drain_timeout"]
        for pod in pods(objects)
        for c in pod.spec["containers"]
    }
    both = f"target and gateway {drains['ssd-target']:g} s, draft {drains['ssd-draft']:g} s"
    assert f"({both})" in TEXT
    assert drains["ssd-gateway"] == drains["ssd-target"]
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        assert f"between {spec['minReplicas']} and {spec['maxReplicas']}" in TEXT
