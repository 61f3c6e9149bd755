"""What manifests say of each other: labels, ports, Secrets, files, names."""

from collections.abc import Iterator

from tests.deploy.command_lines import is_ours, read
from tests.deploy.manifests import Manifest, Manifests, Pod, name, of_kind, pods, selects
from tests.deploy.needs import SECRETS

NAMESPACE = "ssd"
FILE_FLAGS = (
    "--tls-cert",
    "--tls-key",
    "--tls-ca",
    "--token-file",
    "--draft-tls-ca",
    "--draft-token-file",
    "--target-tls-ca",
    "--target-token-file",
    "--cluster-secret-file",
)


def selectors(objects: Manifests) -> Iterator[str]:
    everything = list(pods(objects))
    for pod in everything:
        selector = pod.owner["spec"].get("selector")
        if selector is not None and not selects(selector, pod.labels):
            yield f"{pod.title}: does not select its own pods"
    for each in of_kind(objects, "Service"):
        selector = {"matchLabels": each["spec"]["selector"]}
        if not any(selects(selector, pod.labels) for pod in everything):
            yield f"{name(each)}: selects no pod"
    for each in of_kind(objects, "PodDisruptionBudget"):
        if not any(selects(each["spec"]["selector"], pod.labels) for pod in everything):
            yield f"{name(each)}: selects no pod"
    for each in of_kind(objects, "NetworkPolicy"):
        if not any(selects(each["spec"]["podSelector"], pod.labels) for pod in everything):
            yield f"{name(each)}: selects no pod"
    for each in of_kind(objects, "StatefulSet"):
        headless = [s for s in of_kind(objects, "Service") if s["spec"].get("clusterIP") == "None"]
        if each["spec"]["serviceName"] not in [s["metadata"]["name"] for s in headless]:
            yield f"{name(each)}: its Service is not there"
    yield from _monitors(objects)


def _monitors(objects: Manifests) -> Iterator[str]:
    for monitor in of_kind(objects, "ServiceMonitor"):
        found = [
            service
            for service in of_kind(objects, "Service")
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        ]
        if len(found) != 1:
            yield f"{name(monitor)}: selects {len(found)} Services"
        for endpoint in monitor["spec"]["endpoints"]:
            for service in found:
                if endpoint["port"] not in [port["name"] for port in service["spec"]["ports"]]:
                    yield f"{name(monitor)}: {name(service)} has no port {endpoint['port']}"


def scrapers(objects: Manifests) -> Iterator[str]:
    """Where a service asks its callers for a certificate, Prometheus has one to show."""
    for monitor in of_kind(objects, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]
        for pod in (pod for pod in pods(objects) if selects(labels, pod.labels)):
            asks = any("--tls-ca" in read(each).raw for each in pod.spec["containers"])
            for endpoint in monitor["spec"]["endpoints"]:
                if asks and not {"cert", "keySecret"} <= endpoint["tlsConfig"].keys():
                    yield f"{name(monitor)}: shows no certificate, and {pod.title} asks for one"


def routes(objects: Manifests) -> Iterator[str]:
    """What a route leads to is there; where that speaks TLS, a policy says whom to expect."""
    for route in of_kind(objects, "HTTPRoute"):
        for reference in (each for rule in route["spec"]["rules"] for each in rule["backendRefs"]):
            yield from _backend(objects, name(route), reference)


def _backend(objects: Manifests, title: str, reference: Manifest) -> Iterator[str]:
    found = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == reference["name"]]
    ports = [p for s in found for p in s["spec"]["ports"] if p["port"] == reference["port"]]
    if not ports:
        yield f"{title}: there is no {reference['name']}:{reference['port']}"
    trusted = {
        (each["name"], each.get("sectionName"))
        for policy in of_kind(objects, "BackendTLSPolicy")
        for each in policy["spec"]["targetRefs"]
    }
    for port in ports:
        if port.get("appProtocol") == "https" and (reference["name"], port["name"]) not in trusted:
            yield f"{title}: {reference['name']} speaks TLS, and nothing says whom to expect"


def service_ports(objects: Manifests) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        for pod in pods(objects):
            if not selects(selector, pod.labels):
                continue
            named = {
                port["name"]: port["containerPort"]
                for container in pod.containers()
                for port in container.get("ports", ())
            }
            for port in service["spec"]["ports"]:
                number = named.get(port["targetPort"])
                if number is None:
                    yield f"{name(service)}: {pod.title} has no port {port['targetPort']}"
                elif service["spec"].get("clusterIP") == "None" and number != port["port"]:
                    yield f"{name(service)}: headless, so that {port['port']} is not {number}"


def volumes(objects: Manifests) -> Iterator[str]:
    made = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    made |= {each["metadata"]["name"] for each in of_kind(objects, "Secret")}
    claims = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    for pod in pods(objects):
        there = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        for volume in there.values():
            yield from _volume(pod, volume, made | SECRETS.keys(), claims)
        for container in pod.containers():
            for mount in container.get("volumeMounts", ()):
                yield from _mount(pod, container, mount, there)


def _volume(pod: Pod, volume: Manifest, secrets: set[str], claims: set[str]) -> Iterator[str]:
    if "secret" in volume:
        called = volume["secret"]["secretName"]
        if called not in secrets:
            yield f"{pod.title}: nobody provides the Secret {called}"
        if volume["secret"].get("optional") is not False:
            yield f"{pod.title}: would start without the Secret {called}"
        if volume["secret"].get("defaultMode", 0o644) & 0o007:
            yield f"{pod.title}: everybody may read the Secret {called}"
    if "persistentVolumeClaim" in volume:
        called = volume["persistentVolumeClaim"]["claimName"]
        if called not in claims:
            yield f"{pod.title}: nobody makes the claim {called}"
        if volume["persistentVolumeClaim"].get("readOnly") is not True:
            yield f"{pod.title}: may write to {called}"
    if "configMap" in volume or "hostPath" in volume:
        yield f"{pod.title}: {volume['name']} is of a kind that we do not use"


def _mount(
    pod: Pod, container: Manifest, mount: Manifest, there: dict[str, Manifest]
) -> Iterator[str]:
    volume = there.get(mount["name"])
    if volume is None:
        yield f"{pod.title} {container['name']}: no volume {mount['name']}"
        return
    if "subPath" in mount:
        yield f"{pod.title} {container['name']}: {mount['name']} would never be updated"
    if ("secret" in volume or "persistentVolumeClaim" in volume) and not mount.get("readOnly"):
        yield f"{pod.title} {container['name']}: {mount['name']} is not read-only"


def files(objects: Manifests) -> Iterator[str]:
    """Every file that a flag names is a key of a Secret that is mounted there."""
    for pod in pods(objects):
        for container in filter(is_ours, pod.spec["containers"]):
            line, there = read(container), secret_files(pod, container)
            for flag in FILE_FLAGS:
                path = line.text(flag)
                if path is not None and path not in there:
                    yield f"{pod.title} {container['name']}: nothing puts {path} there"
            wanted = _wanted_flags(line.program, line.command)
            for flag in wanted - line.raw.keys():
                yield f"{pod.title} {container['name']}: is not secured by {flag}"


def _wanted_flags(program: str, command: str) -> set[str]:
    """Secured by default: certificates and tokens on every port, both ways between services."""
    server = {"--tls-cert", "--tls-key", "--token-file"}
    return {
        ("ssd-target", "serve"): server | {"--draft-tls-ca", "--draft-token-file"},
        ("ssd-draft", "serve"): server | {"--tls-ca"},
        ("ssd-gateway", "serve"): server | {"--target-tls-ca", "--target-token-file"},
        ("ssd-target", "join"): {"--cluster-secret-file"},
    }.get((program, command), {"--tls-ca", "--token-file"})


def secret_files(pod: Pod, container: Manifest) -> dict[str, tuple[str, str]]:
    """Path in the container, and the Secret and key that it shows."""
    there = {volume["name"]: volume.get("secret") for volume in pod.spec.get("volumes", ())}
    found = {}
    for mount in container.get("volumeMounts", ()):
        secret = there.get(mount["name"])
        if secret is None:
            continue
        called = secret["secretName"]
        items = secret.get("items") or [
            {"key": key, "path": key} for key in SECRETS.get(called, ())
        ]
        for item in items:
            found[f"{mount['mountPath']}/{item['path']}"] = called, item["key"]
    return found


def certificates(objects: Manifests) -> Iterator[str]:
    """Whoever is dialled by a name has it in its certificate. Where an operator brings their own,
    the names are those of docs/deploy.md."""
    names = {
        each["spec"]["secretName"]: set(each["spec"]["dnsNames"])
        for each in of_kind(objects, "Certificate")
        if "dnsNames" in each["spec"]
    }
    if not names:
        return
    for secret, host in dialled_names(objects):
        if host not in names.get(secret, ()):
            yield f"{secret}: is dialled as {host}, and its certificate does not say so"


def dialled_names(objects: Manifests) -> Iterator[tuple[str, str]]:
    """Secret of the server, and the name that a client expects in its certificate."""
    for pod in pods(objects):
        for container in filter(is_ours, pod.spec["containers"]):
            line = read(container)
            if line.program == "ssd-target" and line.serves:
                for address in line.options["draft"]:
                    yield "ssd-draft-tls", host_of(address)
            if line.program == "ssd-client":
                yield "ssd-target-tls", host_of(line.raw["--target"])
            if line.program == "ssd-gateway":
                for address in line.options["target"]:
                    yield "ssd-target-tls", host_of(address)
                yield "ssd-gateway-tls", f"ssd-gateway.{NAMESPACE}.svc"
    for monitor in of_kind(objects, "ServiceMonitor"):
        service = monitor["metadata"]["name"]
        for endpoint in monitor["spec"]["endpoints"]:
            yield f"{service}-tls", endpoint["tlsConfig"]["serverName"]
    for policy in of_kind(objects, "BackendTLSPolicy"):
        for reference in policy["spec"]["targetRefs"]:
            yield f"{reference['name']}-tls", policy["spec"]["validation"]["hostname"]
    yield "ssd-target-tls", f"ssd-target.{NAMESPACE}.svc"


def host_of(address: str) -> str:
    return address.removeprefix("dns:///").rpartition(":")[0]
