"""--local: a target and a draft process that live exactly as long as the command.

The processes are real, their models are not: packages `ssd_target` and `ssd_draft` that serve a
script stand in.
"""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import check_address
from ssd_client.errors import ClientError
from ssd_client.local.launcher import LocalFlags, LocalPlan, check_installed, plan_local
from ssd_client.local.service import NEEDS_SERVE
from ssd_client.terminal.prompt import LOCAL_DEFAULT
from tests.client.scripted_target import full_text
from tests.process_tree import is_alive
from tests.suite.scale import full_only
from tests.waiting import HANG_SECONDS, wait_until

SERVICES = ("ssd_target", "ssd_draft")
SERVING = health_pb2.HealthCheckResponse.SERVING

FAKE_SERVICE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

behaviour = json.loads(os.environ[f"FAKE_{__package__.upper()}"])
here = Path(os.environ["FAKE_FOLDER"]) / __package__
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # an engine
(here / "pids").write_text(f"{os.getpid()} {helper.pid}")
mps = {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")}
(here / "mps").write_text(json.dumps(mps))
(here / "arguments").write_text(json.dumps(sys.argv[1:]))

def fail():
    for number in range(100):
        print("line", number, file=sys.stderr)
    sys.stderr.flush()
    helper.kill()
    os._exit(behaviour["fails"])

def leave():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes once for each thread of the client
    requests = [each.SerializeToString().hex() for each in running.requests]
    (here / "requests").write_text("\\n".join(requests))
    helper.kill()
    helper.wait()
    os._exit(0)

if behaviour.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: leave())
if "fails" in behaviour and not behaviour.get("listens_first"):
    fail()

from grpc_health.v1 import health, health_pb2
from tests.client.scripted_target import Script, serve

class Asked(health.HealthServicer):  # notes its answers
    def Check(self, request, context):
        answer = super().Check(request, context)
        with (here / "asked").open("a") as file:
            file.write(f"{answer.status}\\n")
        return answer

checks = Asked()
with serve(Script(**behaviour.get("script", {})), checks=checks) as running:
    port_file = Path(sys.argv[sys.argv.index("--port-file") + 1])
    part = port_file.with_suffix(".part")
    part.write_text(running.address.rsplit(":", 1)[1] + "\\n")
    part.rename(port_file)
    if "fails" in behaviour:
        fail()
    if not behaviour.get("never_ready"):
        checks.set("readiness", health_pb2.HealthCheckResponse.SERVING)
    time.sleep(600)
"""


class Sandbox:
    """A folder from which `--local` finds the stand-ins for the services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for service in SERVICES:
            (folder / service).mkdir()
            (folder / service / "__init__.py").touch()
            (folder / service / "__main__.py").write_text(FAKE_SERVICE)
        (folder / "torch.py").touch()

    def start(
        self, *arguments: str, target: dict | None = None, draft: dict | None = None, **settings
    ) -> subprocess.Popen:
        paths = [str(self.folder), str(Path(__file__).parents[3])]
        inherited = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([*paths, *inherited]),
            "FAKE_SSD_TARGET": json.dumps(target or {}),
            "FAKE_SSD_DRAFT": json.dumps(draft or {}),
            "FAKE_FOLDER": str(self.folder),
        }
        command = [sys.executable, "-m", "ssd_client", "generate", "--local", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            command, env=environment, **pipes, **{"stdin": subprocess.DEVNULL, **settings}
        )

    def hanging(self, *arguments: str) -> subprocess.Popen:
        """A client whose text has begun, and does not end."""
        process = self.start("Once", *arguments, target={"script": {"hang_after": 3}})
        process.stdout.read(5)
        return process

    def change_client(self, statements: str) -> None:
        """What the client's process, and no other, executes first."""
        code = f"import sys\nif 'ssd_client' in sys.orig_argv:\n    {statements}\n"
        (self.folder / "sitecustomize.py").write_text(code)

    def run(self, *arguments: str, **settings) -> tuple[int, str, str]:
        process = self.start(*arguments, **settings)
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        return process.returncode, stdout.decode(), stderr.decode()

    def arguments(self, service: str) -> list[str] | None:
        """What a service was started with, but for where it listens; None if it was not."""
        path = self.folder / service / "arguments"
        if not path.exists():
            return None
        *arguments, listen, address, port_file, _ = json.loads(path.read_text())
        assert (listen, address, port_file) == ("--listen", "127.0.0.1:0", "--port-file")
        return arguments

    def mps(self, service: str) -> dict[str, str]:
        """What the environment of a service says about MPS."""
        return json.loads((self.folder / service / "mps").read_text())

    def requests(self) -> list[target_pb2.GenerateRequest]:
        lines = (self.folder / "ssd_target" / "requests").read_text().splitlines()
        return [target_pb2.GenerateRequest.FromString(bytes.fromhex(each)) for each in lines]

    def asked(self, service: str) -> list[int]:
        """What a service answered to the client's questions for its health."""
        path = self.folder / service / "asked"
        return [int(each) for each in path.read_text().split()] if path.exists() else []

    def pids(self, *services: str) -> list[int]:
        """Processes of these services, or of all; the first of a service is itself."""
        files = [self.folder / service / "pids" for service in services or SERVICES]
        return [int(each) for file in files if file.exists() for each in file.read_text().split()]

    def wait_until_gone(self) -> None:
        """Until the services and their helpers have ended."""
        wait_until(lambda: not any(map(is_alive, self.pids())), self.pids)

    def interrupt(self, process: subprocess.Popen, number: signal.Signals) -> bytes:
        """The client ends by this signal, and with it the services; returns its stdout."""
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 128 + number, stderr
        assert b"Traceback" not in stderr
        self.wait_until_gone()
        return stdout


@pytest.fixture
def sandbox(tmp_path):
    made = Sandbox(tmp_path)
    yield made
    for pid in made.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_shipped_target_has_its_draft_beside_it(sandbox):
    code, stdout, stderr = sandbox.run("Once")
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    ready = "stories-target with stories-draft ready after "
    assert re.fullmatch(rf"{ready}.*\n12 tokens · .*\n", stderr)
    assert sandbox.arguments("ssd_draft") == ["serve", "stories-draft"]
    *arguments, address = sandbox.arguments("ssd_target")
    assert check_address(address)
    assert arguments == ["serve", "stories-target", "--draft", address, "--trust-draft"]
    assert not sandbox.requests()[0].HasField("speculation")  # the server's own is used
    assert len(sandbox.pids()) == 4
    sandbox.wait_until_gone()


def test_the_draft_is_waited_for(sandbox):
    process = sandbox.start("Once", draft={"never_ready": True})
    wait_until(lambda: SERVING in sandbox.asked("ssd_target"))
    before = len(sandbox.asked("ssd_draft"))
    wait_until(lambda: len(sandbox.asked("ssd_draft")) > before + 1)  # though the target is ready
    assert process.poll() is None
    assert sandbox.interrupt(process, signal.SIGINT) == b""


@pytest.mark.parametrize("sign", ["speculators_model_type", "draft_vocab_size", "eagle_config"])
def test_a_head_is_told_its_target(tmp_path, sign):
    """It lacks the target's embedding, and mostly its tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({sign: "eagle3", "hidden_size": 64}))
    flags = LocalFlags(local_model="models/target", local_draft=str(tmp_path))
    assert plan_local(flags).draft_flags[-2:] == ("--target-model", "models/target")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    assert "--target-model" not in plan_local(flags).draft_flags


@pytest.mark.parametrize(
    ("target", "draft", "failed"),
    [
        ({"never_ready": True}, {"fails": 7}, "draft stories-draft"),
        ({"never_ready": True}, {"fails": 7, "listens_first": True}, "draft stories-draft"),
        ({"fails": 7}, {"never_ready": True}, "stories-target"),
    ],
)
def test_a_service_that_fails_to_start_is_quoted_and_takes_the_other_along(
    sandbox, target, draft, failed
):
    code, stdout, stderr = sandbox.run("Once", draft=draft, target=target)
    assert (code, stdout) == (1, "")
    assert stderr.startswith(f"error: {failed} ended with status 7; its last lines:\n")
    assert stderr.endswith("\n  line 98\n  line 99\n")
    assert "line 80\n" not in stderr
    sandbox.wait_until_gone()


def test_a_draft_that_dies_half_way_fails_nothing(sandbox):
    process = sandbox.start("Once", target={"script": {"pause_s": 0.1}})
    beginning = process.stdout.read(1)
    os.kill(sandbox.pids("ssd_draft")[0], signal.SIGKILL)
    rest = process.stdout.read()
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, stderr
    assert (beginning + rest).decode() == full_text(12) + "\n"
    sandbox.wait_until_gone()  # what the dead draft left behind, too


def test_a_target_that_dies_is_quoted_after_its_text(sandbox):
    code, stdout, stderr = sandbox.run("Once", target={"script": {"exit_after": 3}})
    assert (code, stdout) == (1, full_text(2) + "\n")
    assert "error: stories-target ended with status 3" in stderr
    sandbox.wait_until_gone()


def test_a_first_look_needs_no_prompt(sandbox):
    ours, theirs = pty.openpty()
    code, stdout, stderr = sandbox.run(stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    (request,) = sandbox.requests()
    assert request.chat.messages[0].content == LOCAL_DEFAULT


def test_without_the_serving_extra(sandbox):
    main = sandbox.folder / "ssd_target" / "__main__.py"
    main.write_text("import nowhere_to_be_found\n")
    code, _, stderr = sandbox.run("Once")
    assert (code, stderr.startswith(f"error: {NEEDS_SERVE}")) == (1, True), stderr
    assert stderr.endswith("(ModuleNotFoundError: No module named 'nowhere_to_be_found')\n")


def test_a_module_that_is_missing_is_seen_before_anything_starts():
    check_installed(["json"], NEEDS_SERVE)
    with pytest.raises(ClientError, match="--local needs the serving extra: pip install"):
        check_installed(["json", "nowhere_to_be_found"], NEEDS_SERVE)


@pytest.mark.parametrize(
    "number", [full_only(signal.SIGINT), full_only(signal.SIGTERM), signal.SIGHUP]
)
def test_a_signal_ends_client_and_services(sandbox, mps, number):
    stdout = sandbox.interrupt(sandbox.hanging("--local-mps"), number)
    assert stdout.endswith(b"\n")
    mps.check_started_and_stopped()


@pytest.mark.parametrize("service", ["ssd_draft", "ssd_target"])
def test_a_signal_while_they_start(sandbox, service):
    process = sandbox.start("Once", target={"never_ready": True}, draft={"never_ready": True})
    wait_until((sandbox.folder / service / "arguments").exists)
    if service == "ssd_target":
        wait_until(lambda: sandbox.asked("ssd_target"))  # both load
    sandbox.interrupt(process, signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_client_takes_its_services_along(sandbox):
    process = sandbox.hanging()
    process.kill()
    process.communicate(timeout=HANG_SECONDS)
    sandbox.wait_until_gone()


def test_a_stubborn_service_is_killed_with_its_helpers(sandbox):
    sandbox.change_client("import ssd_client.local.service as local; local._GRACE_S = 0.3")
    code, stdout, stderr = sandbox.run("Once", target={"stubborn": True})
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    sandbox.wait_until_gone()


def test_target_and_draft_share_a_gpu(sandbox, mps):
    code, stdout, stderr = sandbox.run("Once", "--local-mps", "--local-draft-share", "20")
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    folder = mps.check_started_and_stopped()
    shared = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    assert sandbox.mps("ssd_target") == {**shared, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80"}
    assert sandbox.mps("ssd_draft") == {**shared, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}
    assert not is_alive(mps.pid())
    sandbox.wait_until_gone()


@pytest.mark.parametrize("number", [full_only(signal.SIGINT), signal.SIGTERM])
def test_a_signal_while_the_daemon_starts(sandbox, mps, number):
    mps.be_slow()
    sandbox.change_client("import ssd_client.local.mps as mps; mps._LIMIT_S = 600")
    process = sandbox.start("Once", "--local-mps")
    wait_until(mps.has_daemon)
    sandbox.interrupt(process, number)
    mps.check_started_and_stopped()
    assert sandbox.pids() == []


DEVICE_CUDA = ("--device", "cuda")


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        (LocalFlags(), LocalPlan("stories-target", "stories-draft")),
        (LocalFlags(local_draft="d"), LocalPlan("stories-target", "d")),
        (LocalFlags(local_draft="none"), LocalPlan("stories-target")),
        (LocalFlags(local_model="m"), LocalPlan("m")),
        (LocalFlags(local_model="m", local_draft="d"), LocalPlan("m", "d")),
        (LocalFlags(mode="ssd"), LocalPlan("stories-target", "stories-draft")),
        (LocalFlags(mode="off", local_draft="d"), LocalPlan("stories-target")),
        (
            LocalFlags(mode="sync"),
            LocalPlan("stories-target", None, ("--draft-model", "stories-draft")),
        ),
        (
            LocalFlags(draft=("h:1", "h:2")),
            LocalPlan("stories-target", None, ("--draft", "h:1", "--draft", "h:2")),
        ),
        (
            LocalFlags(draft=("h:1",), mode="ssd", local_draft="none"),
            LocalPlan("stories-target", None, ("--draft", "h:1")),
        ),
        (
            LocalFlags(local_device="cuda"),
            LocalPlan("stories-target", "stories-draft", DEVICE_CUDA, DEVICE_CUDA),
        ),
        (
            LocalFlags(local_draft_device="cpu"),
            LocalPlan("stories-target", "stories-draft", (), ("--device", "cpu")),
        ),
        (
            LocalFlags(local_device="cuda", mode="sync"),
            LocalPlan("stories-target", None, ("--draft-model", "stories-draft", *DEVICE_CUDA)),
        ),
        (
            LocalFlags(local_mps=True, local_draft_share=30),
            LocalPlan("stories-target", "stories-draft", mps=True, draft_share=30),
        ),
        (
            LocalFlags(local_mps=True),
            LocalPlan("stories-target", "stories-draft", mps=True, draft_share=30),
        ),
        (LocalFlags(local_mps=True, mode="off"), LocalPlan("stories-target")),
        (LocalFlags(local_draft_device="cpu", mode="off"), LocalPlan("stories-target")),
    ],
)
def test_what_is_started(flags, plan):
    assert plan_local(flags) == plan
