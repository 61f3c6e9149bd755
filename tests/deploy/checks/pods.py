"""What a container may do, and what it may take."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.command_lines import ours
from tests.deploy.manifests import Manifests, pods, unmet

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
        rules = {
            "runAsNonRoot is not True": whole.get("runAsNonRoot") is True,
            "seccompProfile is not that of the runtime": whole.get("seccompProfile")
            == {"type": "RuntimeDefault"},
            "runs as a user of the system": whole.get("runAsUser", 0) >= 1000,
        }
        rules |= {key: not pod.spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")}
        yield from unmet(pod.title, rules)
        for container in pod.containers():
            own = container.get("securityContext", {})
            rules = {
                "allowPrivilegeEscalation is not False": own.get("allowPrivilegeEscalation")
                is False,
                "readOnlyRootFilesystem is not True": own.get("readOnlyRootFilesystem") is True,
                "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
                "is privileged": not own.get("privileged"),
            }
            yield from unmet(pod.name_of(container), rules)


def no_account_token(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        rules = {
            "mounts the token of its account": "automountServiceAccountToken",
            "variables of Services would be taken for options": "enableServiceLinks",
        }
        yield from unmet(
            pod.title, {wrong: pod.spec.get(key) is False for wrong, key in rules.items()}
        )


def resources(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers():
            has = {"requests": {}, "limits": {}, **container.get("resources", {})}
            requests, limits = has["requests"], has["limits"]
            rules = {
                f"no {kind} of {what}": what in has[kind]
                for kind in ("requests", "limits")
                for what in ("cpu", "memory")
            }
            rules |= {
                f"requests more {what} than its limit": quantity(requests[what])
                <= quantity(limits[what])
                for what in requests.keys() & limits.keys()
            }
            rules |= {"GPUs cannot be overcommitted": requests.get(GPU) == limits.get(GPU)}
            yield from unmet(pod.name_of(container), rules)


def temporary_volumes(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        limits = [each.get("resources", {}).get("limits", {}) for each in pod.spec["containers"]]
        memory = sum(quantity(each.get("memory", "0")) for each in limits)
        for volume in pod.spec.get("volumes", ()):
            about = volume.get("emptyDir", {"sizeLimit": "0"})
            much = about.get("medium") == "Memory" and quantity(about.get("sizeLimit", "0"))
            rules = {
                f"{volume['name']} has no sizeLimit": "sizeLimit" in about,
                f"{volume['name']} may take more than half of the memory": much <= memory / 2,
            }
            yield from unmet(pod.title, rules)


def writable_places(objects: Manifests) -> Iterator[str]:
    """What a service writes to: /tmp; with an engine, /dev/shm for its ranks, and the kernel
    cache."""
    for pod, container, line in ours(objects):
        if line.program == "ssd-client":
            continue
        mounts = {each["mountPath"]: each["name"] for each in container.get("volumeMounts", ())}
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        wanted = {"/tmp"}
        if line.program != "ssd-gateway":
            wanted |= {"/dev/shm", line.raw.get("--kernel-cache") or "/var/cache/ssd"}
        rules = {f"cannot write to {place}": place in mounts for place in sorted(wanted)}
        shared = volumes.get(mounts.get("/dev/shm"), {}).get("emptyDir", {})
        in_memory = shared.get("medium") == "Memory"
        rules["/dev/shm is not memory"] = in_memory or "/dev/shm" not in mounts
        yield from unmet(pod.name_of(container), rules)


def ranks(objects: Manifests) -> Iterator[str]:
    for pod, container, line in ours(objects):
        gpus = int(container["resources"].get("limits", {}).get(GPU, "0"))
        if not gpus or not line.serves or "tp" not in line.options:  # it has no model
            continue
        ranks, device = line.options["tp"], line.options["device"]
        nodes = int(line.raw.get("--nodes") or 1)
        rules = {
            f"{ranks} ranks on {nodes} nodes of {gpus} GPUs": ranks == gpus * nodes,
            f"has GPUs, and runs on {device}": device == "cuda",
        }
        yield from unmet(pod.title, rules)


def images(objects: Manifests) -> Iterator[str]:
    known = {f"{image}:{VERSION}" for image in IMAGES}
    for pod in pods(objects):
        said = [each["image"] for each in pod.containers()]
        yield from unmet(
            pod.title, {f"{image} is no image of ours": image in known for image in said}
        )
