"""What manifests say of each other: labels, ports, Secrets, files, names."""

from collections.abc import Iterator

from tests.deploy.command_lines import ours
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
from tests.deploy.needs import SECRETS

NAMESPACE = "ssd"
# Secured by default: certificates and tokens on every port, both ways between services.
SERVER = {"--tls-cert", "--tls-key", "--token-file"}
CLIENT = {"--tls-ca", "--token-file"}
SECURED_BY = {
    ("ssd-target", "serve"): SERVER | {"--draft-tls-ca", "--draft-token-file"},
    ("ssd-draft", "serve"): SERVER | {"--tls-ca"},
    ("ssd-gateway", "serve"): SERVER | {"--target-tls-ca", "--target-token-file"},
    ("ssd-target", "join"): {"--cluster-secret-file"},
}
FILE_FLAGS = CLIENT.union(*SECURED_BY.values())


def selectors(objects: Manifests) -> Iterator[str]:
    for pod in pods(objects):
        selector = pod.owner["spec"].get("selector")
        own = selector is None or selects(selector, pod.labels)
        yield from unmet(pod.title, {"does not select its own pods": own})
    chosen = {
        "Service": lambda spec: {"matchLabels": spec["selector"]},
        "PodDisruptionBudget": lambda spec: spec["selector"],
        "NetworkPolicy": lambda spec: spec["podSelector"],
    }
    for each in of_kind(objects, *chosen):
        selector = chosen[each["kind"]](each["spec"])
        found = any(selects(selector, pod.labels) for pod in pods(objects))
        yield from unmet(name(each), {"selects no pod": found})
    services = of_kind(objects, "Service")
    headless = [name(each) for each in services if each["spec"].get("clusterIP") == "None"]
    for each in of_kind(objects, "StatefulSet"):
        own = f"Service/{each['spec']['serviceName']}" in headless
        yield from unmet(name(each), {"its Service is not there": own})
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]
        found = [each for each in services if selects(selector, each["metadata"]["labels"])]
        ports = {port["name"] for each in found for port in each["spec"]["ports"]}
        rules = {
            f"has no port {port}": port in ports
            for port in (endpoint["port"] for endpoint in monitor["spec"]["endpoints"])
        }
        rules[f"selects {len(found)} Services"] = len(found) == 1
        yield from unmet(name(monitor), rules)


def scrapers(objects: Manifests) -> Iterator[str]:
    """Where a service asks its callers for a certificate, Prometheus has one to show."""
    for monitor in of_kind(objects, "ServiceMonitor"):
        shown = all(
            {"cert", "keySecret"} <= endpoint["tlsConfig"].keys()
            for endpoint in monitor["spec"]["endpoints"]
        )
        rules = {
            f"shows no certificate, and {pod.title} asks for one": shown
            for pod, _, line in ours(objects)
            if "--tls-ca" in line.raw and selects(monitor["spec"]["selector"], pod.labels)
        }
        yield from unmet(name(monitor), rules)


def routes(objects: Manifests) -> Iterator[str]:
    """What a route leads to is there; where that speaks TLS, a policy says whom to expect."""
    trusted = {
        (each["name"], each.get("sectionName"))
        for policy in of_kind(objects, "BackendTLSPolicy")
        for each in policy["spec"]["targetRefs"]
    }
    for route in of_kind(objects, "HTTPRoute"):
        for reference in (each for rule in route["spec"]["rules"] for each in rule["backendRefs"]):
            called, number = reference["name"], reference["port"]
            ports = [
                port
                for service in of_kind(objects, "Service")
                for port in service["spec"]["ports"]
                if (service["metadata"]["name"], port["port"]) == (called, number)
            ]
            secured = {(called, p["name"]) for p in ports if p.get("appProtocol") == "https"}
            rules = {
                f"there is no {called}:{number}": ports,
                f"{called} speaks TLS, and nothing says whom to expect": secured <= trusted,
            }
            yield from unmet(name(route), rules)


def service_ports(objects: Manifests) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        spec = service["spec"]
        for pod in pods(objects):
            if not selects({"matchLabels": spec["selector"]}, pod.labels):
                continue
            named = {
                port["name"]: port["containerPort"]
                for container in pod.containers()
                for port in container.get("ports", ())
            }
            for port in spec["ports"]:
                number = named.get(port["targetPort"])
                same = number == port["port"] or spec.get("clusterIP") != "None"
                rules = {
                    f"{pod.title} has no port {port['targetPort']}": number is not None,
                    f"headless, so that {port['port']} is not {number}": same,
                }
                yield from unmet(name(service), rules)


def volumes(objects: Manifests) -> Iterator[str]:
    made = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    made |= {each["metadata"]["name"] for each in of_kind(objects, "Secret")} | SECRETS.keys()
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    for pod in pods(objects):
        there = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        for volume in there.values():
            yield from unmet(pod.title, _volume(volume, made, claims))
        for container in pod.containers():
            for mount in container.get("volumeMounts", ()):
                volume, free = there.get(mount["name"], {}), mount.get("readOnly")
                rules = {
                    f"no volume {mount['name']}": volume,
                    f"{mount['name']} would never be updated": "subPath" not in mount,
                    f"{mount['name']} is not read-only": free
                    or not {"secret", "persistentVolumeClaim"} & volume.keys(),
                }
                yield from unmet(pod.name_of(container), rules)


def _volume(volume: Manifest, secrets: set[str], claims: set[str]) -> dict[str, bool]:
    if "secret" in volume:
        about = {"defaultMode": 0o644, **volume["secret"]}
        called = about["secretName"]
        return {
            f"nobody provides the Secret {called}": called in secrets,
            f"would start without the Secret {called}": about.get("optional") is False,
            f"everybody may read the Secret {called}": not about["defaultMode"] & 0o007,
        }
    if "persistentVolumeClaim" in volume:
        about = volume["persistentVolumeClaim"]
        called = about["claimName"]
        return {
            f"nobody makes the claim {called}": called in claims,
            f"may write to {called}": about.get("readOnly") is True,
        }
    return {f"{volume['name']} is of a kind that we do not use": "emptyDir" in volume}


def files(objects: Manifests) -> Iterator[str]:
    """Every file that a flag names is a key of a Secret that is mounted there."""
    for pod, container, line in ours(objects):
        there = secret_files(pod, container)
        named = [path for flag in sorted(FILE_FLAGS) if (path := line.raw.get(flag)) is not None]
        rules = {f"nothing puts {path} there": path in there for path in named}
        wanted = SECURED_BY.get((line.program, line.command), CLIENT)
        rules |= {f"is not secured by {flag}": flag in line.raw for flag in wanted}
        yield from unmet(pod.name_of(container), rules)


def secret_files(pod: Pod, container: Manifest) -> dict[str, tuple[str, str]]:
    """Path in the container, and the Secret and key that it shows."""
    secrets = {each["name"]: each["secret"] for each in pod.spec["volumes"] if "secret" in each}
    found = {}
    for mount in container.get("volumeMounts", ()):
        secret = secrets.get(mount["name"], {"secretName": ""})
        called = secret["secretName"]
        items = secret.get("items") or [{"key": k, "path": k} for k in SECRETS.get(called, ())]
        found |= {f"{mount['mountPath']}/{each['path']}": (called, each["key"]) for each in items}
    return found


def certificates(objects: Manifests) -> Iterator[str]:
    """Whoever is dialled by a name has it in its certificate. Where an operator brings their own,
    the names are those of docs/deploy.md."""
    names = {
        each["spec"]["secretName"]: each["spec"]["dnsNames"]
        for each in of_kind(objects, "Certificate")
        if "dnsNames" in each["spec"]
    }
    for secret, host in dialled_names(objects):
        said = not names or host in names.get(secret, ())
        yield from unmet(
            secret, {f"is dialled as {host}, and its certificate does not say so": said}
        )


def dialled_names(objects: Manifests) -> Iterator[tuple[str, str]]:
    """Secret of the server, and the name that a client expects in its certificate."""
    for _, _, line in ours(objects):
        if line.program == "ssd-target" and line.serves:
            yield from (("ssd-draft-tls", host_of(each)) for each in line.options["draft"])
        if line.program == "ssd-client":
            yield "ssd-target-tls", host_of(line.raw["--target"])
        if line.program == "ssd-gateway":
            yield from (("ssd-target-tls", host_of(each)) for each in line.options["target"])
            yield "ssd-gateway-tls", f"ssd-gateway.{NAMESPACE}.svc"
    for monitor in of_kind(objects, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            yield f"{monitor['metadata']['name']}-tls", endpoint["tlsConfig"]["serverName"]
    for policy in of_kind(objects, "BackendTLSPolicy"):
        for reference in policy["spec"]["targetRefs"]:
            yield f"{reference['name']}-tls", policy["spec"]["validation"]["hostname"]
    yield "ssd-target-tls", f"ssd-target.{NAMESPACE}.svc"


def host_of(address: str) -> str:
    return address.removeprefix("dns:///").rpartition(":")[0]
