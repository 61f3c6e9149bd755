"""What the overlay smoke-test says, run here: its commands, its files, its probes, its end."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.checks.references import secret_files
from tests.deploy.manifests import Manifest, Pod, manifests, pods
from tests.deploy.trial_secrets import write_secrets
from tests.processes import SERVING
from tests.suite.tools import needs_tool
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = needs_tool("openssl")

# Below those that the system gives to outgoing connections: a free one stays free.
PORTS = range(20_000 + os.getpid() % 10_000, 32_000)
ANYONE = ssl._create_unverified_context()
# A cluster's names; the certificates know this one, too.
NAMES = re.compile(r"(dns:///)?(ssd-draft-headless|ssd-target(-headless)?):")


class Host:
    """A machine in place of the cluster: Secrets are files, and ports are others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets = write_secrets(folder)
        self._free = filter(is_free, PORTS)
        self._ports: dict[str, str] = {}

    def command(self, pod: Pod, container: Manifest) -> list[str]:
        module = container["command"][0].replace("-", "_")
        words = "\n".join(container["args"])
        for path, (secret, key) in secret_files(pod, container).items():
            words = words.replace(path, str(self.secrets / secret / key))
        words = words.replace("/var/cache/ssd", str(self.folder / f"cache-{container['name']}"))
        return [sys.executable, "-m", module, *self.here(words).split("\n")]

    def start(self, pod: Pod, container: Manifest) -> "subprocess.Popen[bytes]":
        own = {each["name"]: self.here(each["value"]) for each in container.get("env", ())}
        return subprocess.Popen(self.command(pod, container), env={**os.environ, **own})

    def here(self, text: str) -> str:
        """With names and ports of this machine."""
        return re.sub(r":(74\d\d)\b", self._port, NAMES.sub("localhost:", text))

    def _port(self, found: re.Match[str]) -> str:
        if found[1] not in self._ports:
            self._ports[found[1]] = str(next(self._free))
        return f":{self._ports[found[1]]}"

    def answers(self, container: Manifest, kind: str) -> bool:
        """As a kubelet asks: in plain text, for the service that the manifest names; or over HTTPS,
        whatever the certificate says."""
        probe = container[kind]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        try:
            if "httpGet" in probe:
                address = self.here(f"127.0.0.1:{named[probe['httpGet']['port']]}")
                url = f"https://{address}{probe['httpGet']['path']}"
                with urllib.request.urlopen(url, timeout=5, context=ANYONE) as said:
                    return bool(said.status == 200)
            with grpc.insecure_channel(self.here(f"127.0.0.1:{probe['grpc']['port']}")) as channel:
                request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
                return bool(answer.status == SERVING)
        except (OSError, grpc.RpcError):
            return False


def is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.full
def test_the_smoke_test_passes_and_pods_end_as_they_should(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (job,) = [pod for pod in pods(manifests("smoke-test")) if not pod.stays]
    serving = [pod for pod in pods(manifests("smoke-test")) if pod.stays]
    containers = [pod.spec["containers"][0] for pod in serving]
    with ExitStack() as stack:
        running = [host.start(*each) for each in zip(serving, containers, strict=True)]
        for process in running:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            for container in containers:  # a gateway is ready once it has looked at its targets
                wait_until(lambda c=container, k=kind: host.answers(c, k), kind)
        command = host.command(job, job.spec["containers"][0])
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert (done.returncode, "32 tokens" in done.stderr) == (0, True), done.stderr
        assert done.stdout.strip()
        without = [each for each in command if not each.startswith("--token-file")]
        assert subprocess.run(without, capture_output=True, timeout=HANG_SECONDS).returncode != 0
        for process in running:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=HANG_SECONDS) for process in running] == [0, 0, 0]
