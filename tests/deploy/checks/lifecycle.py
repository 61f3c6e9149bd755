"""How pods start, are watched, move and end."""

from collections.abc import Iterator

from tests.deploy.command_lines import CommandLine, config_of, listening, ours, read
from tests.deploy.manifests import (
    Manifest,
    Manifests,
    Pod,
    name,
    of_kind,
    pods,
    selects,
    unmet,
)

LOAD_SECONDS = {"ssd-target": 1800, "ssd-draft": 600, "ssd-gateway": 60}
NODE = "kubernetes.io/hostname"


def _staying(objects: Manifests) -> Iterator[tuple[Pod, Manifest, CommandLine]]:
    return (each for each in ours(objects) if each[2].stays)


def probes(objects: Manifests) -> Iterator[str]:
    """Native gRPC probes, of the right service, on the plain health port; a gateway's are HTTP."""
    for pod, container, line in _staying(objects):
        health = [each.ports[0] for each in listening(line) if each.what == "health-listen"]
        if line.program == "ssd-gateway":
            rules = _http_probes(container, line)
        elif len(health) != 1:
            rules = {"has no plain health port for probes": False}
        else:
            wanted = {"startupProbe": "readiness", "livenessProbe": "liveness"}
            # A draft beside its target is no reason to send no requests to the target.
            if line.program == "ssd-target" or len(pod.spec["containers"]) == 1:
                wanted["readinessProbe"] = "readiness"
            rules = {
                f"{kind} does not ask for {service} at {health[0]}": container.get(kind, {}).get(
                    "grpc"
                )
                == {"port": health[0], "service": service}
                for kind, service in wanted.items()
            }
        yield from unmet(pod.name_of(container), rules)


def _http_probes(container: Manifest, line: CommandLine) -> dict[str, bool]:
    """On the port that it serves on, as it serves it; where callers must show certificates, the
    kubelet has none."""
    rules = {"the kubelet has no certificate to show": "--tls-ca" not in line.raw}
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    (served,) = [each.ports[0] for each in listening(line) if each.what == "listen"]
    scheme = "HTTPS" if "--tls-cert" in line.raw else "HTTP"
    wanted = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for kind, path in wanted.items():
        asked = {"scheme": "HTTP", **container.get(kind, {}).get("httpGet", {})}
        asked["port"] = names.get(asked.get("port"), asked.get("port"))
        rules[f"{kind} does not ask {path} over {scheme}"] = (
            {"path": path, "scheme": scheme, "port": served}.items() <= asked.items()
        )  # fmt: skip
    return rules


def time_to_load(objects: Manifests) -> Iterator[str]:
    for pod, container, line in _staying(objects):
        probe = {"periodSeconds": 10, "failureThreshold": 3, **container.get("startupProbe", {})}
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        wanted = LOAD_SECONDS[line.program]
        rules = {f"{seconds} s to load, at least {wanted}": seconds >= wanted}
        yield from unmet(pod.name_of(container), rules)


def time_to_drain(objects: Manifests) -> Iterator[str]:
    """SIGTERM comes after preStop; SIGKILL must not come before the drain has ended."""
    for pod, container, line in _staying(objects):
        hook = container.get("lifecycle", {}).get("preStop", {})
        sleep = hook.get("sleep", {}).get("seconds", 0)
        needed = sleep + config_of(_that_drains(objects, pod, line)).drain_timeout
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        rules = {
            "no preStop, so that requests still arrive": sleep,
            f"{grace} s of grace, {needed:g} to drain": grace >= needed + 10,
        }
        yield from unmet(pod.name_of(container), rules)


def _that_drains(objects: Manifests, pod: Pod, line: CommandLine) -> CommandLine:
    """Itself; a worker stays until its leader has drained."""
    if line.serves:
        return line
    (leader,) = [p for p in pods(objects) if p.owner is pod.owner and p.part == "leader"]
    return read(leader.spec["containers"][0])


def disruption_budgets(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        over = [
            each["spec"]
            for each in of_kind(objects, "PodDisruptionBudget")
            if selects(each["spec"].get("selector"), pod.labels)
        ]
        counts = [
            (each.get("minAvailable", 0), each.get("maxUnavailable", 1)) for each in over
        ]  # of pods, or percentages
        few = [isinstance(least, int) and least < (pod.replicas or 1) for least, _ in counts]
        rules = {
            f"{len(over)} disruption budgets": len(over) == 1 or not pod.stays,
            "no node with this pod can be drained": all(few) and all(most for _, most in counts),
        }
        yield from unmet(pod.title, rules)


def autoscaled(objects: Manifests) -> Iterator[str]:
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        spec, wanted = scaler["spec"], scaler["spec"]["scaleTargetRef"]
        titles = [
            (each["apiVersion"], name(each))
            for each in objects
            if "replicas" in each.get("spec", ())
        ]
        everything = [(each["apiVersion"], name(each)) for each in objects]
        target = wanted["apiVersion"], f"{wanted['kind']}/{wanted['name']}"
        rules = {
            "scales nothing": everything.count(target) == 1,
            "every apply would take its number back": target not in titles,
            "has nothing to choose from": spec["minReplicas"] < spec["maxReplicas"],
        }
        yield from unmet(name(scaler), rules)


def spread(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        over = [
            each["topologyKey"]
            for each in pod.spec.get("topologySpreadConstraints", ())
            if selects(each["labelSelector"], pod.labels)
        ]
        one = pod.owner["kind"] not in ("StatefulSet", "Deployment")
        yield from unmet(pod.title, {"all of its pods may end up on one node": one or NODE in over})


def near_targets(objects: Manifests) -> Iterator[str]:
    by_program = {
        program: [p for p in pods(objects) if p.labels["app.kubernetes.io/name"] == program]
        for program in ("ssd-target", "ssd-draft")
    }
    for pod in by_program["ssd-draft"]:
        near = pod.spec.get("affinity", {}).get("podAffinity", {})
        terms = near.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        selectors = [term["podAffinityTerm"]["labelSelector"] for term in terms]
        rules = {
            "may wait for ever for room beside a target": (
                "requiredDuringSchedulingIgnoredDuringExecution" not in near
            ),
            "is nowhere near its targets": any(
                selects(each, t.labels) for each in selectors for t in by_program["ssd-target"]
            ),
        }
        yield from unmet(pod.title, rules)
