"""--local: a target process that lives exactly as long as the command.

The process is real, its model is not: a package `ssd_target` that serves a script stands in.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_target import full_text

from ssd.v1 import target_pb2
from ssd_client.prompt import LOCAL_DEFAULT

FAKE_TARGET = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

behaviour = json.loads(os.environ["FAKE_TARGET"])
here = Path(os.environ["FAKE_FOLDER"])
(here / "arguments").write_text(json.dumps(sys.argv[1:]))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # an engine
(here / "pids").write_text(f"{os.getpid()} {helper.pid}")

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
if "fails" in behaviour:
    for number in range(100):
        print("line", number, file=sys.stderr)
    helper.kill()
    sys.exit(behaviour["fails"])

from scripted_target import Script, serve

with serve(Script(**behaviour.get("script", {}))) as running:
    port_file = Path(sys.argv[sys.argv.index("--port-file") + 1])
    part = port_file.with_suffix(".part")
    part.write_text(running.address.rsplit(":", 1)[1] + "\\n")
    part.rename(port_file)
    if not behaviour.get("never_ready"):
        time.sleep(0.2)
        running.set_ready()
    time.sleep(60)
"""


class Sandbox:
    """A folder from which `--local` finds the stand-in for the target."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ssd_target").mkdir()
        (folder / "ssd_target" / "__init__.py").touch()
        (folder / "ssd_target" / "__main__.py").write_text(FAKE_TARGET)
        (folder / "torch.py").touch()

    def start(self, *arguments: str, behaviour: str = "{}", **settings) -> subprocess.Popen:
        paths = [str(self.folder), str(Path(__file__).parent)]
        inherited = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([*paths, *inherited]),
            "FAKE_TARGET": behaviour,
            "FAKE_FOLDER": str(self.folder),
        }
        settings = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **settings}
        return subprocess.Popen(
            [sys.executable, "-m", "ssd_client", "generate", *arguments],
            env=environment,
            **{"stdout": subprocess.PIPE, **settings},
        )

    def run(self, *arguments: str, **settings) -> tuple[int, str, str]:
        process = self.start(*arguments, **settings)
        stdout, stderr = process.communicate(timeout=30)
        return process.returncode, stdout.decode(), stderr.decode()

    def pids(self) -> list[int]:
        return [int(each) for each in (self.folder / "pids").read_text().split()]

    def all_gone(self) -> bool:
        """Whether target and helper have ended, within a moment."""
        end = time.monotonic() + 5
        while any(_alive(pid) for pid in self.pids()):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def sandbox(tmp_path):
    made = Sandbox(tmp_path)
    yield made
    if (tmp_path / "pids").exists():
        for pid in made.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_generation_on_a_local_target(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", "--local-model", "other")
    assert (code, stdout) == (0, full_text(12) + "\n"), stderr
    ready, statistics = stderr.splitlines()
    assert ready.startswith("other ready after ")
    assert statistics.startswith("12 tokens · ")
    arguments = json.loads((sandbox.folder / "arguments").read_text())
    assert arguments[:-1] == ["serve", "other", "--listen", "127.0.0.1:0", "--port-file"]
    assert sandbox.all_gone()


def test_a_first_look_needs_no_prompt(sandbox):
    ours, theirs = pty.openpty()
    process = sandbox.start("--local", stdin=theirs)
    stdout, stderr = process.communicate(timeout=30)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, stderr
    assert stdout.decode() == full_text(12) + "\n"
    (request,) = (sandbox.folder / "requests").read_text().splitlines()
    message = target_pb2.GenerateRequest.FromString(bytes.fromhex(request)).chat.messages[0]
    assert message == target_pb2.ChatMessage(role="user", content=LOCAL_DEFAULT)
    assert '"stories-target"' in (sandbox.folder / "arguments").read_text()


def test_a_target_that_fails_to_start_is_quoted(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", behaviour='{"fails": 7}')
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: stories-target ended with status 7; its last lines:\n")
    assert stderr.endswith("\n  line 98\n  line 99\n")
    assert "line 80\n" not in stderr


def test_a_target_that_dies_is_quoted_after_its_text(sandbox):
    code, stdout, stderr = sandbox.run("Once", "--local", behaviour='{"script": {"exit_after": 3}}')
    assert (code, stdout) == (1, full_text(2) + "\n")
    assert "error: stories-target ended with status 3" in stderr
    assert sandbox.all_gone()  # what the dead target left behind, too


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


HANGING = '{"script": {"hang_after": 3}}'


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_client_and_target(sandbox, number, code):
    process = sandbox.start("Once", "--local", behaviour=HANGING)
    process.stdout.read(5)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert stdout.endswith(b"\n")
    assert b"Traceback" not in stderr
    assert sandbox.all_gone()


def test_a_signal_while_it_starts(sandbox):
    process = sandbox.start("Once", "--local", behaviour='{"never_ready": true}')
    while not (sandbox.folder / "pids").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 143
    assert b"Traceback" not in stderr
    assert sandbox.all_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_client_takes_the_target_along(sandbox):
    process = sandbox.start("Once", "--local", behaviour=HANGING)
    process.stdout.read(5)
    process.kill()
    process.communicate(timeout=20)
    assert sandbox.all_gone()


def test_a_stubborn_target_is_killed_with_its_helpers(sandbox):
    (sandbox.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'ssd_client' in sys.orig_argv:\n"
        "    import ssd_client.local as local\n"
        "    local.LocalTarget.__init__.__kwdefaults__['grace_s'] = 0.3\n"
    )
    process = sandbox.start("Once", "--local", behaviour='{"stubborn": true}')
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert stdout.decode() == full_text(12) + "\n"
    assert sandbox.all_gone()
