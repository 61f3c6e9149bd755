"""--local: a target and a draft process that live exactly as long as the command.

The processes are real, their models are not: packages `ssd_target` and `ssd_draft` that serve a
script stand in. The real ones are started at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from ssd.v1 import target_pb2
from ssd_client.connection.endpoints import check_address
from ssd_client.errors import BadInputError
from ssd_client.local.launcher import LocalFlags, LocalPlan, plan_local
from ssd_client.terminal.prompt import LOCAL_DEFAULT
from tests.client.scripted_target import full_text
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

from grpc_health.v1 import health
from tests.client.scripted_target import Script, serve

class Asked(health.HealthServicer):  # notes its answers
    def Check(self, request, context):
        answer = super().Check(request, context)
        with (here / "asked").open("a") as file:
            file.write(f"{answer.status}\\n")
        return answer

with serve(Script(**behaviour.get("script", {})), checks=Asked()) as running:
    port_file = Path(sys.argv[sys.argv.index("--port-file") + 1])
    part = port_file.with_suffix(".part")
    part.write_text(running.address.rsplit(":", 1)[1] + "\\n")
    part.rename(port_file)
    if "fails" in behaviour:
        fail()
    while not all(Path(each).exists() for each in behaviour.get("ready_after", [])):
        time.sleep(0.02)
    if not behaviour.get("never_ready"):
        running.set_ready()
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
        settings = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **settings}
        return subprocess.Popen(
            [sys.executable, "-m", "ssd_client", "generate", *arguments],
            env=environment,
            **{"stdout": subprocess.PIPE, **settings},
        )

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

    def wait_for_start(self, service: str) -> None:
        wait_until((self.folder / service / "arguments").exists, f"the start of {service}")

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
        wait_until(lambda: not any(_alive(pid) for pid in self.pids()), self.pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def sandbox(tmp_path):
    made = Sandbox(tmp_path)
    yield made
    for pid in made.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_generation_on_a_local_target(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", "--local-model", "other")
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    ready, statistics = stderr.splitlines()
    assert ready.startswith("other ready after ")
    assert statistics.startswith("12 tokens · ")
    assert sandbox.arguments("ssd_target") == ["serve", "other"]
    assert sandbox.arguments("ssd_draft") is None
    sandbox.wait_until_gone()


def test_the_shipped_target_has_its_draft_beside_it(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local")
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    assert stderr.startswith("stories-target with stories-draft ready after ")
    assert sandbox.arguments("ssd_draft") == ["serve", "stories-draft"]
    *arguments, address = sandbox.arguments("ssd_target")
    assert check_address(address)
    assert arguments == ["serve", "stories-target", "--draft", address, "--trust-draft"]
    assert not sandbox.requests()[0].HasField("speculation")  # the server's own is used
    assert len(sandbox.pids()) == 4
    sandbox.wait_until_gone()


def test_target_and_draft_load_at_the_same_time(sandbox):
    """Each is ready only once the other has started."""
    started = {each: str(sandbox.folder / each / "arguments") for each in SERVICES}
    code, _, stderr = sandbox.run(
        "Once",
        "--local",
        target={"ready_after": [started["ssd_draft"]]},
        draft={"ready_after": [started["ssd_target"]]},
    )
    assert code == 0, stderr


def test_the_draft_is_waited_for(sandbox):
    process = sandbox.start("Once", "--local", draft={"never_ready": True})
    wait_until(lambda: SERVING in sandbox.asked("ssd_target"))
    before = len(sandbox.asked("ssd_draft"))
    wait_until(lambda: len(sandbox.asked("ssd_draft")) > before + 1)  # though the target is ready
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, stdout) == (130, b"")
    sandbox.wait_until_gone()


@pytest.mark.parametrize("flags", [["--mode", "off"], full_only(["--local-draft", "none"])])
def test_no_draft_is_started_where_none_is_used(sandbox, flags):
    code, _, stderr = sandbox.run("Once", "--local", *flags)
    assert code == 0, stderr
    assert sandbox.arguments("ssd_target") == ["serve", "stories-target"]
    assert sandbox.arguments("ssd_draft") is None


@pytest.mark.parametrize("sign", ["speculators_model_type", "draft_vocab_size", "eagle_config"])
def test_a_head_is_told_its_target(tmp_path, sign):
    """It lacks the target's embedding, and mostly its tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({sign: "eagle3", "hidden_size": 64}))
    flags = LocalFlags(local_model="models/target", local_draft=str(tmp_path))
    assert plan_local(flags).draft_flags[-2:] == ("--target-model", "models/target")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    assert "--target-model" not in plan_local(flags).draft_flags


@pytest.mark.full
def test_sync_speculation_has_the_draft_model_in_the_target(sandbox):
    code, _, stderr = sandbox.run("Once", "--local", "--mode", "sync", "--local-draft", "folder")
    assert code == 0, stderr
    expected = ["serve", "stories-target", "--draft-model", "folder"]
    assert sandbox.arguments("ssd_target") == expected
    assert sandbox.arguments("ssd_draft") is None
    assert sandbox.requests()[0].speculation.mode == target_pb2.SPECULATION_MODE_SYNC


@pytest.mark.parametrize("listens_first", [False, True])
def test_a_draft_that_fails_to_start_is_quoted(sandbox, listens_first):
    behaviour = {"fails": 7, "listens_first": listens_first}
    # The target never gets ready: a failure of the draft is seen at once all the same.
    code, stdout, stderr = sandbox.run(
        "Once", "--local", draft=behaviour, target={"never_ready": True}
    )
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: draft stories-draft ended with status 7; its last lines:\n")
    assert stderr.endswith("\n  line 98\n  line 99\n")
    sandbox.wait_until_gone()


def test_a_target_that_fails_takes_its_loading_draft_along(sandbox):
    code, _, stderr = sandbox.run(
        "Once", "--local", target={"fails": 7}, draft={"never_ready": True}
    )
    assert code == 1
    assert stderr.startswith("error: stories-target ended with status 7")
    sandbox.wait_until_gone()


def test_a_draft_that_dies_half_way_fails_nothing(sandbox):
    process = sandbox.start("Once", "--local", target={"script": {"pause_s": 0.1}})
    beginning = process.stdout.read(1)
    os.kill(sandbox.pids("ssd_draft")[0], signal.SIGKILL)
    rest = process.stdout.read()
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, stderr
    assert (beginning + rest).decode() == full_text(12) + "\n"
    sandbox.wait_until_gone()  # what the dead draft left behind, too


def test_a_first_look_needs_no_prompt(sandbox):
    ours, theirs = pty.openpty()
    process = sandbox.start("--local", stdin=theirs)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, stderr
    assert stdout.decode() == full_text(12) + "\n"
    (request,) = sandbox.requests()
    message = request.chat.messages[0]
    assert message == target_pb2.ChatMessage(role="user", content=LOCAL_DEFAULT)


def test_a_target_that_fails_to_start_is_quoted(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", target={"fails": 7})
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: stories-target ended with status 7; its last lines:\n")
    assert stderr.endswith("\n  line 98\n  line 99\n")
    assert "line 80\n" not in stderr


def test_a_target_that_dies_is_quoted_after_its_text(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", target={"script": {"exit_after": 3}})
    assert (code, stdout) == (1, full_text(2) + "\n")
    assert "error: stories-target ended with status 3" in stderr
    sandbox.wait_until_gone()  # what the dead target left behind, too


def test_without_the_serving_extra(sandbox):
    (sandbox.folder / "torch.py").unlink()
    # A finder that knows no torch, whatever is installed here.
    (sandbox.folder / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    code, _, stderr = sandbox.run("Once", "--local")
    assert code == 1
    assert stderr == 'error: --local needs the serving extra: pip install "ssd-serve[serve]"\n'


def test_a_missing_module_of_the_target(sandbox):
    main = sandbox.folder / "ssd_target" / "__main__.py"
    main.write_text("import nowhere_to_be_found\n")
    code, _, stderr = sandbox.run("Once", "--local")
    assert code == 1
    assert stderr.startswith("error: --local needs the serving extra")
    assert stderr.endswith("(ModuleNotFoundError: No module named 'nowhere_to_be_found')\n")


HANGING = {"script": {"hang_after": 3}}


@pytest.mark.parametrize(
    ("number", "code"),
    [full_only(signal.SIGINT, 130), full_only(signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_client_and_services(sandbox, number, code):
    process = sandbox.start("Once", "--local", target=HANGING)
    process.stdout.read(5)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, stderr
    assert stdout.endswith(b"\n")
    assert b"Traceback" not in stderr
    sandbox.wait_until_gone()


@pytest.mark.parametrize("service", ["ssd_draft", "ssd_target"])
def test_a_signal_while_they_start(sandbox, service):
    process = sandbox.start(
        "Once", "--local", target={"never_ready": True}, draft={"never_ready": True}
    )
    sandbox.wait_for_start(service)
    if service == "ssd_target":
        wait_until(lambda: sandbox.asked("ssd_target"))  # both load
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143, stderr
    assert b"Traceback" not in stderr
    sandbox.wait_until_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_client_takes_its_services_along(sandbox):
    process = sandbox.start("Once", "--local", target=HANGING)
    process.stdout.read(5)
    process.kill()
    process.communicate(timeout=HANG_SECONDS)
    sandbox.wait_until_gone()


@pytest.mark.parametrize("service", ["target", full_only("draft")])
def test_a_stubborn_service_is_killed_with_its_helpers(sandbox, service):
    sandbox.change_client("import ssd_client.local.service as local; local._GRACE_S = 0.3")
    process = sandbox.start("Once", "--local", **{service: {"stubborn": True}})
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, stderr
    assert stdout.decode() == full_text(12) + "\n"
    sandbox.wait_until_gone()


def test_both_run_where_local_device_says(sandbox):
    code, _, stderr = sandbox.run(
        "Once", "--local", "--local-device", "cuda", "--local-draft-device", "cpu"
    )
    assert code == 0, stderr
    assert sandbox.arguments("ssd_target")[:4] == ["serve", "stories-target", "--device", "cuda"]
    assert sandbox.arguments("ssd_draft") == ["serve", "stories-draft", "--device", "cpu"]


def test_target_and_draft_share_a_gpu(sandbox, mps):
    code, stdout, stderr = sandbox.run(
        "Once", "--local", "--local-mps", "--local-draft-share", "20"
    )
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    folder = mps.check_started_and_stopped()
    shared = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    assert sandbox.mps("ssd_target") == {**shared, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80"}
    assert sandbox.mps("ssd_draft") == {**shared, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}
    assert not _alive(mps.pid())
    sandbox.wait_until_gone()


def test_they_share_it_by_a_daemon_that_runs(sandbox, mps, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    code, _, stderr = sandbox.run("Once", "--local", "--local-mps", "--local-draft-share", "100")
    assert code == 0, stderr
    assert mps.calls() == []
    for service in SERVICES:
        assert sandbox.mps(service) == {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}


@pytest.mark.full
def test_a_draft_has_a_small_part_of_a_shared_gpu_to_itself(sandbox, mps):
    code, _, stderr = sandbox.run("Once", "--local", "--local-mps")
    assert code == 0, stderr
    shares = {s: sandbox.mps(s)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for s in SERVICES}
    assert shares == {"ssd_draft": "30", "ssd_target": "70"}


@pytest.mark.full
def test_no_daemon_where_nothing_is_shared(sandbox, mps):
    code, _, stderr = sandbox.run("Once", "--local", "--local-mps", "--mode", "off")
    assert code == 0, stderr
    assert mps.calls() == []
    assert sandbox.mps("ssd_target") == {}


def test_a_draft_that_fails_takes_the_daemon_along(sandbox, mps):
    code, _, stderr = sandbox.run("Once", "--local", "--local-mps", draft={"fails": 7})
    assert code == 1
    assert stderr.startswith("error: draft stories-draft ended with status 7")
    mps.check_started_and_stopped()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_daemon_too(sandbox, mps, number, code):
    process = sandbox.start("Once", "--local", "--local-mps", target=HANGING)
    process.stdout.read(5)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, stderr
    assert b"Traceback" not in stderr
    mps.check_started_and_stopped()
    sandbox.wait_until_gone()


@pytest.mark.parametrize(("number", "code"), [full_only(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_daemon_starts(sandbox, mps, number, code):
    mps.be_slow()
    sandbox.change_client("import ssd_client.local.mps as mps; mps._LIMIT_S = 600")
    process = sandbox.start("Once", "--local", "--local-mps")
    wait_until(mps.has_daemon)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code, stderr
    mps.check_started_and_stopped()
    assert sandbox.pids() == []


def test_a_daemon_that_does_not_start_is_quoted(sandbox, mps):
    mps.fail_with("no permission\nmore\n")
    code, stdout, stderr = sandbox.run("Once", "--local", "--local-mps")
    assert (code, stdout) == (1, "")
    assert stderr == "error: --local-mps: the MPS daemon did not start: no permission\n"
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (LocalFlags(mode="sync", local_model="m"), "sync needs a draft model"),
        (LocalFlags(mode="ssd", local_model="m"), "ssd needs a draft"),
        (LocalFlags(mode="ssd", local_draft="none"), "ssd needs a draft"),
        (LocalFlags(local_draft="d", draft=("h:1",)), "not both"),
        (LocalFlags(local_mps=True, mode="sync"), "--local-mps: with --mode sync"),
        (LocalFlags(local_draft_device="cpu", draft=("h:1",)), "not for --draft"),
        (LocalFlags(local_mps=True, local_draft="none"), "by --local-draft"),
    ],
)
def test_flags_that_contradict_each_other(flags, message):
    with pytest.raises(BadInputError, match=message):
        plan_local(flags)


# Branches are waited for, however slow the machine is, and no link is given up.
PATIENT = {
    "WAIT": "10000",
    "AUTO_OFF": "false",
    "ADAPT_DEPTH": "false",
    "LINK_TIMEOUT": "3600",
}


class RealPair:
    """The client with the real services, and how many processes it left."""

    def __init__(self) -> None:
        self._mark = f"SSD_TEST_MARK={uuid.uuid4()}".encode()

    def start(self, *arguments: str) -> subprocess.Popen:
        name, value = self._mark.decode().split("=")
        prompt = ["Once upon a time", "--seed", "7", "--temperature", "0.7"]
        return subprocess.Popen(
            [sys.executable, "-m", "ssd_client", "generate", "--local", *prompt, *arguments],
            env={**os.environ, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def generate(self, *arguments: str) -> dict:
        process = self.start("--max-tokens", "80", "--json", *arguments)
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, stderr.decode()
        return json.loads(stdout)

    def left_behind(self) -> list[str]:
        return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if self._is(path)]

    def _is(self, environ: Path) -> bool:
        try:
            return self._mark in environ.read_bytes().split(b"\0")
        except OSError:  # another user's, or gone
            return False


@pytest.mark.full
def test_the_real_pair_gives_the_text_of_plain_decoding(monkeypatch):
    for name, value in PATIENT.items():
        monkeypatch.setenv(f"SSD_TARGET_{name}", value)
    pair = RealPair()
    plain, speculated = pair.generate("--mode", "off"), pair.generate()
    assert plain["speculation"]["mode"] == "off"
    assert speculated["speculation"]["mode"] == "ssd"  # the default where there is a draft
    stats = speculated["speculation"]
    assert stats["cache_rounds"] + stats["just_in_time_rounds"] > 0
    assert speculated["token_ids"] == plain["token_ids"]
    assert pair.left_behind() == []


@pytest.mark.full
def test_a_real_target_drafts_for_itself_in_sync_mode():
    pair = RealPair()
    plain, speculated = pair.generate("--mode", "off"), pair.generate("--mode", "sync")
    assert speculated["speculation"]["sync_rounds"] > 0
    assert speculated["token_ids"] == plain["token_ids"]


@pytest.mark.full
def test_a_real_pair_goes_with_a_killed_client():
    pair = RealPair()
    process = pair.start("--max-tokens", "1000", "--ignore-eos")
    process.stdout.read(1)
    assert len(pair.left_behind()) >= 3  # the client, the target, the draft
    process.kill()
    process.communicate(timeout=HANG_SECONDS)
    wait_until(lambda: pair.left_behind() == [], pair.left_behind)
