"""Who can reach whom, held against where processes listen and what they dial."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.deploy.checks.references import host_of
from tests.deploy.command_lines import Listening, listening, ours
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

DNS = range(53, 54)
EPHEMERAL = "net.ipv4.ip_local_port_range"
SIDES = {"ingress": "from", "egress": "to"}


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
    return [
        Opening(
            name(policy),
            tuple(rule.get(SIDES[direction], ())),
            range(port["port"], port.get("endPort", port["port"]) + 1),
            port["protocol"],
        )
        for policy in of_kind(objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], pod.labels)
        for rule in policy["spec"].get(direction, ())
        for port in rule.get("ports", ())
    ]


def default_deny(objects: Manifests) -> Iterator[str]:
    policies = of_kind(objects, "NetworkPolicy")
    closed = [
        each["spec"]["podSelector"] == {} and not any(each["spec"].get(way) for way in SIDES)
        for each in policies
    ]
    yield from unmet("policies", {"no policy denies everything by default": any(closed)})
    for each in policies:
        both = set(each["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        yield from unmet(name(each), {"says nothing of one direction": both})
        for way, side in SIDES.items():
            for rule in each["spec"].get(way) or ():
                rules = {
                    f"a rule of {way} for everybody, or every port": rule.get(side)
                    and rule.get("ports"),
                    f"a rule of {way} for everybody": all(map(_narrow, rule.get(side, ()))),
                }
                yield from unmet(name(each), rules)


def _narrow(peer: Manifest) -> bool:
    """An empty selector is everybody; so is an address, of whom we know nothing."""
    return "ipBlock" not in peer and bool(peer) and all(peer.values())


def _listening(objects: Manifests, *own: Pod) -> list[Listening]:
    """Where these pods listen beyond loopback."""
    places = [
        place
        for pod, _, line in ours(objects)
        if pod in own
        for place in listening(line)
        if place.beyond_loopback
    ]
    settings = [
        each["value"].split()
        for pod in own
        for each in pod.spec.get("securityContext", {}).get("sysctls", ())
        if each["name"] == EPHEMERAL
    ]
    return places + [Listening("nccl", "0.0.0.0", range(int(a), int(b) + 1)) for a, b in settings]


def ports_are_covered(objects: Manifests) -> Iterator[str]:
    """Every port beyond loopback is open to those whom it is for: to some pods, or, for health, to
    the kubelet alone, which no policy stops."""
    for pod in pods(objects):
        opened, places = openings(objects, pod, "ingress"), _listening(objects, pod)
        rules: dict[str, object] = {}
        for place in places:
            covering = [each for each in opened if _within(place.ports, each.ports)]
            if place.what == "health-listen":
                rules |= {f"{each.policy} opens its plain health port": False for each in covering}
            else:
                rules[f"no policy opens {_say(place.ports)} ({place.what})"] = covering
        taken = [port for place in places for port in place.ports]
        rules["two of its processes listen on one port"] = len(taken) == len(set(taken))
        declared = {
            port["containerPort"] for each in pod.containers() for port in each.get("ports", ())
        }
        single = {place.ports[0] for place in places if len(place.ports) == 1}
        rules[f"declares ports {declared}, listens on {single}"] = declared == single
        yield from unmet(pod.title, rules)


def nothing_else_is_open(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        # A policy for all pods of a group names what any of them listens on.
        group = [each for each in pods(objects) if pod.part and each.owner is pod.owner]
        own = _listening(objects, pod, *group)
        rules = {
            f"{each.policy} opens {_say(each.ports)}, where nobody listens": each.protocol == "TCP"
            and any(_within(each.ports, place.ports) for place in own)
            for each in openings(objects, pod, "ingress")
        }
        for each in openings(objects, pod, "egress"):
            reached = [other for other in pods(objects) if each.lets(other.labels)]
            there = any(_within(each.ports, p.ports) for p in _listening(objects, *reached))
            rules[f"{each.policy} lets it dial {_say(each.ports)} of nobody"] = (
                there or each.ports == DNS
            )
        yield from unmet(pod.title, rules)


def dialled(objects: Manifests) -> Iterator[str]:
    """Both ends' policies let through what the command lines dial."""
    for pod, _, line in ours(objects):
        if line.command == "join":
            yield from _joins(objects, pod)
        elif line.program == "ssd-client":
            yield from _reaches(objects, pod, line.raw["--target"])
        for address in line.options.get("draft" if line.program == "ssd-target" else "target", ()):
            if line.serves:
                yield from _reaches(objects, pod, address)


def _reaches(objects: Manifests, pod: Pod, address: str) -> Iterator[str]:
    host, port = host_of(address), int(address.rpartition(":")[2])
    if host in ("localhost", "127.0.0.1"):
        lines = [line for other, _, line in ours(objects) if other == pod]
        beside = [place for line in lines for place in listening(line) if port in place.ports]
        yield from unmet(pod.title, {f"nobody in the pod listens on {port}": beside})
        return
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    spec = services.get(host, {"clusterIP": "None", "selector": {"no": "such"}})
    rules = {
        f"dials {host}, which is no Service": host in services,
        f"{host} stands for one address, not for all": spec.get("clusterIP") == "None"
        or not address.startswith("dns:///"),
        f"cannot look up {host}": _may_look_up(objects, pod),
    }
    yield from unmet(pod.title, rules)
    for other in pods(objects):
        if selects({"matchLabels": spec["selector"]}, other.labels):
            planes = [p.ports for p in _listening(objects, other) if p.what == "plane-ports"]
            for ports in (range(port, port + 1), *planes):
                yield from _passes(objects, pod, other, ports)


def _may_look_up(objects: Manifests, pod: Pod) -> bool:
    return any(each.ports == DNS for each in openings(objects, pod, "egress"))


def _joins(objects: Manifests, pod: Pod) -> Iterator[str]:
    """Leader and workers dial each other, wherever they listen for that."""
    yield from unmet(pod.title, {"cannot look up its leader": _may_look_up(objects, pod)})
    group = [each for each in pods(objects) if each.owner is pod.owner]
    for one in group:
        for other in group:
            for place in _listening(objects, other):
                if place.what in ("cluster-listen", "nccl"):
                    yield from _passes(objects, one, other, place.ports)


def _passes(objects: Manifests, pod: Pod, other: Pod, ports: range) -> Iterator[str]:
    ways = ((pod, other, "egress"), (other, pod, "ingress"))
    out, inward = (
        [
            opening
            for opening in openings(objects, here, direction)
            if opening.lets(there.labels) and _within(ports, opening.ports)
        ]
        for here, there, direction in ways
    )
    yield from unmet(pod.title, {f"no policy lets it dial {_say(ports)} of {other.title}": out})
    yield from unmet(other.title, {f"no policy lets {pod.title} in at {_say(ports)}": inward})


def _within(ports: range, wider: range) -> bool:
    return wider.start <= ports.start and ports.stop <= wider.stop


def _say(ports: range) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
