"""What the overlay smoke-test says, run here: its commands, its files, its probes, its end."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.checks.references import secret_files
from tests.deploy.manifests import Manifest, Pod, manifests, pods
from tests.deploy.trial_secrets import write_secrets
from tests.suite.tools import needs_tool
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = needs_tool("openssl")

# Below those that the system gives to outgoing connections: a free one stays free.
PORTS = [str(port) for port in range(20_000 + os.getpid() % 10_000, 32_000)]
SERVING = health_pb2.HealthCheckResponse.SERVING
# A cluster's names; the certificates know this one, too.
NAMES = re.compile(r"(dns:///)?(ssd-draft-headless|ssd-target(-headless)?):")


class Host:
    """A machine in place of the cluster: Secrets are files, and ports are others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "secrets").mkdir()
        self.secrets = write_secrets(folder / "secrets")
        self._ports: dict[str, str] = {}

    def port(self, number: int) -> int:
        return int(self._here(f":{number}")[1:])

    def command(self, pod: Pod, container: Manifest) -> list[str]:
        module = container["command"][0].replace("-", "_")
        arguments = [self._placed(each, pod, container) for each in container["args"]]
        return [sys.executable, "-m", module, *arguments]

    def variables(self, container: Manifest) -> dict[str, str]:
        own = {each["name"]: self._here(each["value"]) for each in container.get("env", ())}
        return {**os.environ, **own}

    def _placed(self, argument: str, pod: Pod, container: Manifest) -> str:
        for path, (secret, key) in secret_files(pod, container).items():
            argument = argument.replace(path, str(self.secrets / secret / key))
        cache = self._folder / f"cache-{container['name']}"
        return self._here(argument.replace("/var/cache/ssd", str(cache)))

    def _here(self, text: str) -> str:
        text = NAMES.sub("localhost:", text)
        return re.sub(r":(74\d\d)\b", lambda found: f":{self._port(found[1])}", text)

    def _port(self, number: str) -> str:
        if number not in self._ports:
            free = next(
                port for port in PORTS if port not in self._ports.values() and is_free(port)
            )
            self._ports[number] = free
        return self._ports[number]


def probed_port(container: Manifest) -> int:
    probe = container["startupProbe"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    number: int = probe["grpc"]["port"] if "grpc" in probe else named[probe["httpGet"]["port"]]
    return number


def is_free(port: str) -> bool:
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("", int(port)))
        except OSError:
            return False
    return True


@dataclass
class Running:
    container: Manifest
    process: subprocess.Popen[str]
    health: str  # address

    def probe(self, kind: str) -> bool:
        """As a kubelet asks: in plain text, for the service that the manifest names; or over HTTPS,
        whatever the certificate says."""
        if "httpGet" in self.container[kind]:
            return self._asks(self.container[kind]["httpGet"]["path"])
        request = health_pb2.HealthCheckRequest(service=self.container[kind]["grpc"]["service"])
        with grpc.insecure_channel(self.health) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
        return bool(answer.status == SERVING)

    def _asks(self, path: str) -> bool:
        anyone = ssl._create_unverified_context()
        try:
            url = f"https://{self.health}{path}"
            with urllib.request.urlopen(url, timeout=5, context=anyone) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_for(self, kind: str) -> None:
        wait_until(lambda: self.probe(kind) or self.process.poll() is not None, kind)
        assert self.process.poll() is None, "it has ended"


@dataclass
class Cluster:
    services: Mapping[str, Running]
    smoke_test: list[str]
    metrics: str  # URL, of the target
    gateway: str  # URL
    authority: Path  # that Prometheus trusts

    def scrape(self) -> str:
        trusting = ssl.create_default_context(cafile=self.authority)
        with urllib.request.urlopen(self.metrics, timeout=10, context=trusting) as answer:
            text: str = answer.read().decode()
        return text

    def complete(self, token: str | None = "") -> Any:
        """A completion by way of the gateway, with the smoke test's own token unless another is
        given; None: with none."""
        key = (self.authority.parents[1] / "ssd-client-access" / "token").read_text().strip()
        shown = {} if token is None else {"Authorization": f"Bearer {token or key}"}
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "seed": 1}).encode()
        headers = {"Content-Type": "application/json", **shown}
        request = urllib.request.Request(self.gateway + "/v1/completions", body, headers)
        trusting = ssl.create_default_context(cafile=self.authority)
        with urllib.request.urlopen(request, timeout=HANG_SECONDS, context=trusting) as answer:
            return json.load(answer)

    def wait_for_link(self) -> None:
        up = re.compile(r'^ssd_links?(_state)?\{.*state="up".*\} 1', re.MULTILINE)
        wait_until(lambda: up.search(self.scrape()), "a link of target and draft")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    host = Host(tmp_path_factory.mktemp("cluster"))
    running, smoke_test = {}, []
    with ExitStack() as stack:
        for pod in pods(manifests("smoke-test")):
            (container,) = pod.spec["containers"]
            command = host.command(pod, container)
            if not pod.stays:
                smoke_test = command
                continue
            process = subprocess.Popen(command, env=host.variables(container), text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            health = f"127.0.0.1:{host.port(probed_port(container))}"
            running[container["name"]] = Running(container, process, health)
        for each in running.values():
            each.wait_for("startupProbe")
        metrics = f"https://localhost:{host.port(7411)}/metrics"
        gateway = f"https://localhost:{host.port(7440)}"
        authority = host.secrets / "ssd-client-tls" / "ca.crt"
        yield Cluster(running, smoke_test, metrics, gateway, authority)


@pytest.mark.full
def test_the_smoke_test_passes_and_pods_end_as_they_should(cluster: Cluster) -> None:
    for each in cluster.services.values():
        each.wait_for("readinessProbe")  # a gateway's, once it has looked at its targets
        assert each.probe("livenessProbe")
    cluster.wait_for_link()
    done = subprocess.run(cluster.smoke_test, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "32 tokens" in done.stderr
    without = [each for each in cluster.smoke_test if not each.startswith("--token-file")]
    assert subprocess.run(without, capture_output=True, timeout=HANG_SECONDS).returncode != 0
    assert cluster.complete()["usage"]["completion_tokens"] == 8
    with pytest.raises(urllib.error.HTTPError, match="401"):
        cluster.complete(token=None)
    for each in cluster.services.values():
        each.process.send_signal(signal.SIGTERM)
    ended = [each.process.wait(timeout=HANG_SECONDS) for each in cluster.services.values()]
    assert ended == [0, 0, 0]
