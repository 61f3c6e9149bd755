"""What a container may do, and what it may take."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.command_lines import is_ours, read
from tests.deploy.manifests import Manifest, Manifests, Pod, pods

ROOT = Path(__file__).resolve().parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGES = {"ssd-cpu", "ssd-cuda", "ssd-gateway", "ssd-client"}
GPU = "nvidia.com/gpu"
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3, "": 1}


def quantity(text: str) -> float:
    number = text.rstrip("KMGim")
    return float(number) * UNITS[text[len(number) :]]


def security(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        whole = pod.spec.get("securityContext", {})
        wanted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        for key, value in wanted.items():
            if whole.get(key) != value:
                yield f"{pod.title}: {key} is not {value}"
        if not whole.get("runAsUser", 0) >= 1000:
            yield f"{pod.title}: runs as a user of the system"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(key):
                yield f"{pod.title}: {key}"
        for container in pod.containers():
            yield from _container_security(pod, container)


def _container_security(pod: Pod, container: Manifest) -> Iterator[str]:
    own = container.get("securityContext", {})
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    for key, value in wanted.items():
        if own.get(key) is not value:
            yield f"{pod.title} {container['name']}: {key} is not {value}"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{pod.title} {container['name']}: keeps capabilities"
    if own.get("privileged"):
        yield f"{pod.title} {container['name']}: is privileged"


def no_account_token(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.title}: mounts the token of its account"
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.title}: variables of Services would be taken for options"


def resources(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers():
            has = container.get("resources", {})
            for kind in ("requests", "limits"):
                for what in ("cpu", "memory"):
                    if what not in has.get(kind, {}):
                        yield f"{pod.title} {container['name']}: no {kind} of {what}"
            requests, limits = has.get("requests", {}), has.get("limits", {})
            for what in requests.keys() & limits.keys():
                if quantity(requests[what]) > quantity(limits[what]):
                    yield f"{pod.title} {container['name']}: requests more {what} than its limit"
            if requests.get(GPU) != limits.get(GPU):
                yield f"{pod.title} {container['name']}: GPUs cannot be overcommitted"


def temporary_volumes(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        memory = sum(
            quantity(each.get("resources", {}).get("limits", {}).get("memory", "0"))
            for each in pod.spec["containers"]
        )
        for volume in pod.spec.get("volumes", ()):
            if "emptyDir" not in volume:
                continue
            size = volume["emptyDir"].get("sizeLimit")
            if size is None:
                yield f"{pod.title}: {volume['name']} has no sizeLimit"
            elif volume["emptyDir"].get("medium") == "Memory" and quantity(size) > memory / 2:
                yield f"{pod.title}: {volume['name']} may take more than half of the memory"


def writable_places(objects: Manifests) -> Iterator[str]:
    """What a service writes to: /tmp; with an engine, /dev/shm for its ranks, and the kernel
    cache."""
    for pod, container, mounts in _mounts(objects):
        if not (is_ours(container) and container["command"][0] != "ssd-client"):
            continue
        wanted = {"/tmp"}
        if container["command"][0] != "ssd-gateway":
            wanted |= {"/dev/shm", read(container).text("--kernel-cache") or "/var/cache/ssd"}
        for place in sorted(wanted - mounts.keys()):
            yield f"{pod.title} {container['name']}: cannot write to {place}"
        shared = _volume(pod, mounts.get("/dev/shm", {}).get("name", "")).get("emptyDir", {})
        if "/dev/shm" in mounts and shared.get("medium") != "Memory":
            yield f"{pod.title} {container['name']}: /dev/shm is not memory"


def _mounts(objects: Manifests) -> Iterator[tuple[Pod, Manifest, dict[str, Manifest]]]:
    for pod in pods(objects):
        for container in pod.containers():
            by_path = {each["mountPath"]: each for each in container.get("volumeMounts", ())}
            yield pod, container, by_path


def _volume(pod: Pod, called: str) -> Manifest:
    found: Manifest
    for found in pod.spec.get("volumes", ()):
        if found["name"] == called:
            return found
    return {}


def ranks(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            if not is_ours(container) or not read(container).serves:
                continue
            line = read(container)
            if "tp" not in line.options:  # it has no model
                continue
            gpus = int(container["resources"].get("limits", {}).get(GPU, "0"))
            nodes = int(line.text("--nodes") or 1)
            if gpus and line.options["tp"] != gpus * nodes:
                yield f"{pod.title}: {line.options['tp']} ranks on {nodes} nodes of {gpus} GPUs"
            if gpus and line.options["device"] != "cuda":
                yield f"{pod.title}: has GPUs, and runs on {line.options['device']}"


def images(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers():
            image, _, tag = container["image"].partition(":")
            if image not in IMAGES or tag != VERSION:
                yield f"{pod.title} {container['name']}: {container['image']} is no image of ours"
