"""How pods start, are watched, move and end."""

from collections.abc import Iterator

from tests.deploy.command_lines import config_of, is_ours, listening, read
from tests.deploy.manifests import Manifest, Manifests, Pod, name, of_kind, pods, selects

LOAD_SECONDS = {"ssd-target": 1800, "ssd-draft": 600, "ssd-gateway": 60}
NODE = "kubernetes.io/hostname"


def _staying(objects: Manifests) -> Iterator[tuple[Pod, Manifest]]:
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            if is_ours(container) and read(container).stays:
                yield pod, container


def probes(objects: Manifests) -> Iterator[str]:
    """Native gRPC probes, of the right service, on the plain health port; a gateway's are HTTP."""
    for pod, container in _staying(objects):
        line = read(container)
        if line.program == "ssd-gateway":
            yield from _http_probes(pod, container)
            continue
        health = [each for each in listening(line) if each.what == "health-listen"]
        if len(health) != 1:
            yield f"{pod.title} {container['name']}: has no plain health port for probes"
            continue
        wanted = {"startupProbe": "readiness", "livenessProbe": "liveness"}
        # A draft beside its target is no reason to send no requests to the target.
        if line.program == "ssd-target" or len(pod.spec["containers"]) == 1:
            wanted["readinessProbe"] = "readiness"
        for kind, service in wanted.items():
            expected = {"port": health[0].ports[0], "service": service}
            if container.get(kind, {}).get("grpc") != expected:
                yield f"{pod.title} {container['name']}: {kind} does not ask {expected}"


def _http_probes(pod: Pod, container: Manifest) -> Iterator[str]:
    """On the port that it serves on, as it serves it; where callers must show certificates, the
    kubelet has none."""
    line = read(container)
    if "--tls-ca" in line.raw:
        yield f"{pod.title} {container['name']}: the kubelet has no certificate to show"
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    (served,) = [each.ports[0] for each in listening(line) if each.what == "listen"]
    scheme = "HTTPS" if "--tls-cert" in line.raw else "HTTP"
    wanted = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    for kind, path in wanted.items():
        asked = container.get(kind, {}).get("httpGet", {})
        port = names.get(asked.get("port"), asked.get("port"))
        if (asked.get("path"), asked.get("scheme", "HTTP"), port) != (path, scheme, served):
            yield f"{pod.title} {container['name']}: {kind} does not ask {path} over {scheme}"


def time_to_load(objects: Manifests) -> Iterator[str]:
    for pod, container in _staying(objects):
        probe = container.get("startupProbe", {})
        seconds = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        wanted = LOAD_SECONDS[container["command"][0]]
        if seconds < wanted:
            yield f"{pod.title} {container['name']}: {seconds} s to load, at least {wanted}"


def time_to_drain(objects: Manifests) -> Iterator[str]:
    """SIGTERM comes after preStop; SIGKILL must not come before the drain has ended."""
    for pod, container in _staying(objects):
        sleep = _sleep(container)
        if not sleep:
            yield f"{pod.title} {container['name']}: no preStop, so that requests still arrive"
        needed = sleep + _drain_timeout(objects, pod, container)
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        if grace < needed + 10:
            yield f"{pod.title} {container['name']}: {grace} s of grace, {needed:g} to drain"


def _sleep(container: Manifest) -> int:
    lifecycle = container.get("lifecycle", {})
    seconds: int = lifecycle.get("preStop", {}).get("sleep", {}).get("seconds", 0)
    return seconds


def _drain_timeout(objects: Manifests, pod: Pod, container: Manifest) -> float:
    """Its own; a worker stays until its leader has drained."""
    line = read(container)
    if line.serves:
        return config_of(line).drain_timeout
    (leader,) = [p for p in pods(objects) if p.owner is pod.owner and p.part == "leader"]
    return config_of(read(leader.spec["containers"][0])).drain_timeout


def disruption_budgets(objects: Manifests) -> Iterator[str]:
    budgets = of_kind(objects, "PodDisruptionBudget")
    for pod in pods(objects):
        over = [b for b in budgets if selects(b["spec"].get("selector"), pod.labels)]
        if pod.stays and len(over) != 1:
            yield f"{pod.title}: {len(over)} disruption budgets"
        for budget in over:
            least = budget["spec"].get("minAvailable", 0)
            if not isinstance(least, int) or least >= (pod.replicas or 1):
                yield f"{name(budget)}: no node with this pod can be drained"
            if budget["spec"].get("maxUnavailable", 1) == 0:
                yield f"{name(budget)}: no node with this pod can be drained"


def autoscaled(objects: Manifests) -> Iterator[str]:
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        owned = [
            each
            for each in of_kind(objects, target["kind"])
            if each["metadata"]["name"] == target["name"]
            and each["apiVersion"] == target["apiVersion"]
        ]
        if len(owned) != 1:
            yield f"{name(scaler)}: scales nothing"
        if any("replicas" in each["spec"] for each in owned):
            yield f"{name(scaler)}: every apply would take its number back"
        if not scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]:
            yield f"{name(scaler)}: has nothing to choose from"


def spread(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        if pod.owner["kind"] not in ("StatefulSet", "Deployment"):
            continue
        rules = pod.spec.get("topologySpreadConstraints", ())
        own = [each for each in rules if selects(each["labelSelector"], pod.labels)]
        if NODE not in [each["topologyKey"] for each in own]:
            yield f"{pod.title}: all of its pods may end up on one node"


def near_targets(objects: Manifests) -> Iterator[str]:
    targets = [pod for pod in pods(objects) if pod.labels["app.kubernetes.io/name"] == "ssd-target"]
    for pod in pods(objects):
        if pod.labels["app.kubernetes.io/name"] != "ssd-draft":
            continue
        near = pod.spec.get("affinity", {}).get("podAffinity", {})
        if "requiredDuringSchedulingIgnoredDuringExecution" in near:
            yield f"{pod.title}: may wait for ever for room beside a target"
        terms = near.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        selectors = [term["podAffinityTerm"]["labelSelector"] for term in terms]
        if not any(selects(each, t.labels) for each in selectors for t in targets):
            yield f"{pod.title}: is nowhere near its targets"
