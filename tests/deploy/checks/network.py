"""Who can reach whom, held against where processes listen and what they dial."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.deploy.checks.references import host_of
from tests.deploy.command_lines import Listening, is_ours, listening, read
from tests.deploy.manifests import Manifest, Manifests, Pod, name, of_kind, pods, selects

DNS = range(53, 54)
EPHEMERAL = "net.ipv4.ip_local_port_range"


@dataclass(frozen=True)
class Opening:
    """A port that a policy opens for some pods."""

    policy: str
    peers: tuple[Manifest, ...]
    ports: range
    protocol: str

    def lets(self, labels: Mapping[str, str]) -> bool:
        """Pods of this namespace with these labels."""
        return any(
            "namespaceSelector" not in peer and selects(peer.get("podSelector"), labels)
            for peer in self.peers
        )


def openings(objects: Manifests, pod: Pod, direction: str) -> list[Opening]:
    """``direction``: ingress or egress, of this pod."""
    side = {"ingress": "from", "egress": "to"}[direction]
    return [
        Opening(name(policy), tuple(rule.get(side, ())), _ports(port), port["protocol"])
        for policy in of_kind(objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction, ())
        for port in rule.get("ports", ())
    ]


def _ports(port: Manifest) -> range:
    low: int = port["port"]
    high: int = port.get("endPort", low)
    return range(low, high + 1)


def default_deny(objects: Manifests) -> Iterator[str]:
    policies = of_kind(objects, "NetworkPolicy")
    both = {"Ingress", "Egress"}
    if not any(
        each["spec"]["podSelector"] == {}
        and set(each["spec"]["policyTypes"]) == both
        and not each["spec"].get("ingress")
        and not each["spec"].get("egress")
        for each in policies
    ):
        yield "no policy denies everything by default"
    for each in policies:
        if set(each["spec"]["policyTypes"]) != both:
            yield f"{name(each)}: says nothing of one direction"
        for direction, side in (("ingress", "from"), ("egress", "to")):
            for rule in each["spec"].get(direction) or ():
                if not rule.get(side) or not rule.get("ports"):
                    yield f"{name(each)}: a rule of {direction} for everybody, or every port"
                if any(not _narrow(peer) for peer in rule.get(side, ())):
                    yield f"{name(each)}: a rule of {direction} for everybody"


def _narrow(peer: Manifest) -> bool:
    """An empty selector is everybody; so is an address, of whom we know nothing."""
    return "ipBlock" not in peer and bool(peer) and all(peer.values())


def _listening(pod: Pod) -> list[Listening]:
    lines = [read(each) for each in pod.spec["containers"] if is_ours(each)]
    places = [place for line in lines for place in listening(line)]
    places += [
        Listening("nccl", "0.0.0.0", _sysctl(each["value"]))
        for each in pod.spec.get("securityContext", {}).get("sysctls", ())
        if each["name"] == EPHEMERAL
    ]
    return [place for place in places if place.beyond_loopback]


def _sysctl(value: str) -> range:
    low, high = map(int, value.split())
    return range(low, high + 1)


def ports_are_covered(objects: Manifests) -> Iterator[str]:
    """Every port beyond loopback is open to those whom it is for: to some pods, or, for health, to
    the kubelet alone, which no policy stops."""
    for pod in pods(objects):
        opened = openings(objects, pod, "ingress")
        places = _listening(pod)
        for place in places:
            covering = [each for each in opened if _within(place.ports, each.ports)]
            if place.what == "health-listen":
                if covering:
                    yield f"{pod.title}: {covering[0].policy} opens its plain health port"
            elif not covering:
                yield f"{pod.title}: no policy opens {_say(place.ports)} ({place.what})"
        taken = [port for place in places for port in place.ports]
        if len(taken) != len(set(taken)):
            yield f"{pod.title}: two of its processes listen on one port"
        declared = {
            port["containerPort"] for each in pod.containers() for port in each.get("ports", ())
        }
        single = {place.ports[0] for place in places if len(place.ports) == 1}
        if declared != single:
            yield f"{pod.title}: declares ports {sorted(declared)}, listens on {sorted(single)}"


def nothing_else_is_open(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        own = [*_listening(pod), *_group(objects, pod)]
        for each in openings(objects, pod, "ingress"):
            if each.protocol != "TCP":
                yield f"{pod.title}: {each.policy} opens {each.protocol}"
            elif not any(_within(each.ports, place.ports) for place in own):
                yield f"{pod.title}: {each.policy} opens {_say(each.ports)}, where nobody listens"
        for each in openings(objects, pod, "egress"):
            reached = [other for other in pods(objects) if each.lets(other.labels)]
            places = [place for other in reached for place in _listening(other)]
            if each.ports != DNS and not any(_within(each.ports, p.ports) for p in places):
                yield f"{pod.title}: {each.policy} lets it dial {_say(each.ports)} of nobody"


def _group(objects: Manifests, pod: Pod) -> list[Listening]:
    """A policy for all pods of a group names what any of them listens on."""
    if not pod.part:
        return []
    others = (each for each in pods(objects) if each.owner is pod.owner)
    return [place for each in others for place in _listening(each)]


def dialled(objects: Manifests) -> Iterator[str]:
    """Both ends' policies let through what the command lines dial."""
    for pod in pods(objects):
        for container in filter(is_ours, pod.spec["containers"]):
            line = read(container)
            if line.program == "ssd-client":
                yield from _reaches(objects, pod, line.raw["--target"])
            elif line.serves and line.program == "ssd-target":
                for address in line.options["draft"]:
                    yield from _reaches(objects, pod, address)
            elif line.serves and line.program == "ssd-gateway":
                for address in line.options["target"]:
                    yield from _reaches(objects, pod, address)
            elif line.command == "join":
                yield from _joins(objects, pod)


def _reaches(objects: Manifests, pod: Pod, address: str) -> Iterator[str]:
    host, port = host_of(address), int(address.rpartition(":")[2])
    if host in ("localhost", "127.0.0.1"):
        if not _beside(pod, port):
            yield f"{pod.title}: nobody in the pod listens on {port}"
        return
    services = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == host]
    if not services:
        yield f"{pod.title}: dials {host}, which is no Service"
        return
    if address.startswith("dns:///") and services[0]["spec"].get("clusterIP") != "None":
        yield f"{pod.title}: {host} stands for one address, not for all"
    selector = {"matchLabels": services[0]["spec"]["selector"]}
    if not any(each.ports == DNS for each in openings(objects, pod, "egress")):
        yield f"{pod.title}: cannot look up {host}"
    for other in pods(objects):
        if selects(selector, other.labels):
            wanted = [range(port, port + 1)]
            wanted += [place.ports for place in _listening(other) if place.what == "plane-ports"]
            for ports in wanted:
                yield from _passes(objects, pod, other, ports)


def _beside(pod: Pod, port: int) -> bool:
    lines = [read(each) for each in pod.spec["containers"] if is_ours(each)]
    return any(port in place.ports for line in lines for place in listening(line))


def _joins(objects: Manifests, pod: Pod) -> Iterator[str]:
    """Leader and workers dial each other, wherever they listen for that."""
    group = [each for each in pods(objects) if each.owner is pod.owner]
    if not any(each.ports == DNS for each in openings(objects, pod, "egress")):
        yield f"{pod.title}: cannot look up its leader"
    for one in group:
        for other in group:
            for place in _listening(other):
                if place.what in ("cluster-listen", "nccl"):
                    yield from _passes(objects, one, other, place.ports)


def _passes(objects: Manifests, pod: Pod, other: Pod, ports: range) -> Iterator[str]:
    out = [each for each in openings(objects, pod, "egress") if each.lets(other.labels)]
    inward = [each for each in openings(objects, other, "ingress") if each.lets(pod.labels)]
    if not any(_within(ports, each.ports) for each in out):
        yield f"{pod.title}: no policy lets it dial {_say(ports)} of {other.title}"
    if not any(_within(ports, each.ports) for each in inward):
        yield f"{other.title}: no policy lets {pod.title} in at {_say(ports)}"


def _within(ports: range, wider: range) -> bool:
    return wider.start <= ports.start and ports.stop <= wider.stop


def _say(ports: range) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
