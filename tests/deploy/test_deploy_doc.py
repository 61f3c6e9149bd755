"""docs/deploy.md says what the files say."""

import re
import shlex
from pathlib import Path

from tests.deploy.command_lines import listening, ours
from tests.deploy.manifests import OVERLAYS, manifests, named, of_kind, parse
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
    (overlay, _) = (parse(block)[0] for block in blocks("yaml"))
    paths += [each.removeprefix("ssd/") for each in overlay["resources"] + overlay["components"]]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_overlays_and_components_are_all_named() -> None:
    assert sorted(codes(row[0])[0] for row in rows("Overlays")) == OVERLAYS
    (line,) = [each for each in section("Overlays").splitlines() if each.startswith("Of `")]
    folders = sorted(each.name for each in (ROOT / "deploy" / "components").iterdir())
    assert sorted(codes(line)[1:]) == folders


def test_secrets_are_those_that_pods_mount() -> None:
    said = {codes(row[0])[0]: frozenset(codes(row[1])) for row in rows("What you provide")}
    assert said == SECRETS


def test_ports_are_those_that_processes_listen_on() -> None:
    cells = [row[0].partition("–") for row in rows("Ports")]
    said = {range(int(low), int(high or low) + 1) for low, _, high in cells}
    listened = {
        place.ports
        for overlay in OVERLAYS
        for _, _, line in ours(manifests(overlay))
        for place in listening(line)
    }
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


def test_times_and_numbers_are_those_of_the_manifests() -> None:
    objects = manifests("gpu")
    drains = {line.program: line.options["drain_timeout"] for _, _, line in ours(objects)}
    both = f"target and gateway {drains['ssd-target']:g} s, draft {drains['ssd-draft']:g} s"
    assert f"({both})" in TEXT
    assert drains["ssd-gateway"] == drains["ssd-target"]
    specs = [each["spec"] for each in of_kind(objects, "HorizontalPodAutoscaler")]
    for spec in specs:
        assert f"between {spec['minReplicas']} and {spec['maxReplicas']}" in TEXT
    adapter = parse(blocks("yaml")[1])[0]
    metrics = [each["pods"] for spec in specs for each in spec["metrics"] if "pods" in each]
    scaled = {each["metric"]["name"] for each in metrics}
    assert adapter["rules"]["custom"][0]["name"]["as"] in scaled
