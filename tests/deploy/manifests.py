"""Manifests as a cluster would get them, and the pods in them."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tools.render_manifests import overlays, rendered

OVERLAYS = overlays()
Manifest = dict[str, Any]
Manifests = list[Manifest]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str) -> Manifests:
    return [each for each in yaml.load_all(text, Loader=_LOADER) if each is not None]


@functools.cache
def _text(overlay: str) -> str:
    return rendered(overlay).read_text()


def manifests(overlay: str) -> Manifests:
    """Of one's own: a test may change them."""
    return parse(_text(overlay))


def of_kind(objects: Manifests, *kinds: str) -> Manifests:
    return [each for each in objects if each["kind"] in kinds]


def name(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def named(objects: Manifests, kind: str, called: str) -> Manifest:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == called]
    return found


def unmet(title: str, rules: Mapping[str, object]) -> Iterator[str]:
    """Rules by what is wrong where they do not hold."""
    return (f"{title}: {wrong}" for wrong, holds in rules.items() if not holds)


@dataclass(frozen=True)
class Pod:
    """A pod template, and who makes pods of it."""

    owner: Manifest
    template: Manifest
    replicas: int | None  # None: an autoscaler says how many
    part: str = ""  # of a set whose pods are not alike

    @property
    def title(self) -> str:
        return name(self.owner) + (f" {self.part}" if self.part else "")

    @property
    def spec(self) -> Any:
        return self.template["spec"]

    @property
    def labels(self) -> Any:
        return self.template["metadata"]["labels"]

    @property
    def stays(self) -> bool:
        """Serves until it is stopped; a Job's pods come to an end by themselves."""
        return self.owner["kind"] != "Job"

    def name_of(self, container: Manifest) -> str:
        return f"{self.title} {container['name']}"

    def containers(self) -> Sequence[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def pods(objects: Manifests) -> Iterator[Pod]:
    for each in of_kind(objects, "StatefulSet", "Deployment"):
        yield Pod(each, each["spec"]["template"], each["spec"].get("replicas"))
    for each in of_kind(objects, "Job"):
        yield Pod(each, each["spec"]["template"], 1)
    for each in of_kind(objects, "LeaderWorkerSet"):
        group = each["spec"]["leaderWorkerTemplate"]
        groups = each["spec"]["replicas"]
        yield Pod(each, group["leaderTemplate"], groups, "leader")
        yield Pod(each, group["workerTemplate"], groups * (group["size"] - 1), "worker")


def selects(selector: Manifest | None, labels: Mapping[str, str]) -> bool:
    """A label selector; an empty one selects everything, none selects nothing."""
    if selector is None:
        return False
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    return equal and all(_meets(rule, labels) for rule in selector.get("matchExpressions", ()))


def _meets(rule: Manifest, labels: Mapping[str, str]) -> bool:
    value = labels.get(rule["key"])
    if rule["operator"] == "In":
        return value in rule["values"]
    raise ValueError(f"the tests do not know the operator {rule['operator']}")
