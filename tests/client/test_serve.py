"""`ssd-client serve`: a pair and a gateway that live exactly as long as the command."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ssd_client.cli import cli
from tests.client.terminal import CLIENT
from tests.process_tree import descendants, is_alive
from tests.waiting import HANG_SECONDS, wait_until

NEEDS = 'error: it needs the extras serve and gateway: pip install "ssd-serve[serve,gateway]"'


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command, and the address that it prints."""
    out, err = folder / "out", folder / "err"
    command = [*CLIENT, "serve", "--listen", "127.0.0.1:0", "--local-device", "cpu"]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        wait_until(lambda: out.read_text().endswith("\n") or process.poll() is not None)
        assert process.poll() is None, err.read_text()
        yield process, out.read_text().strip()
    finally:
        process.terminate()
        process.wait()


def ask(url: str, content: dict[str, Any] | None = None) -> Any:
    body = content and json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        return answer.read()


def test_it_serves_until_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url):
        asked = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 7}
        answer = json.loads(ask(f"{url}/v1/completions", asked))
        assert answer["usage"]["completion_tokens"] == 8
        (model,) = json.loads(ask(f"{url}/v1/models"))["data"]
        assert set(model["speculation_modes"]) == {"off", "sync", "ssd"}
        assert b"<!doctype html>" in ask(f"{url}/").lower()
        about = answer["metrics"]["ssd"]
        timeline = json.loads(ask(f"{url}/ssd/timeline?target={about['target']}"))
        assert "target" in [track["role"] for track in timeline["tracks"]]
        below = descendants(process.pid)
        assert len(below) >= 5  # fronts and engines of two services, and the gateway
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_SECONDS) == 0
    assert [pid for pid in below if is_alive(pid)] == []


@pytest.mark.full
def test_a_gateway_that_dies_ends_it_with_its_reason(tmp_path: Path) -> None:
    with served(tmp_path) as (process, _):
        below = descendants(process.pid)
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
        (gateway,) = [pid for pid, name in names.items() if b"ssd_gateway" in name]
        os.kill(gateway, signal.SIGKILL)
        assert process.wait(timeout=HANG_SECONDS) == 1
    assert "error: the gateway ended with signal 9" in (tmp_path / "err").read_text()
    assert [pid for pid in below if is_alive(pid)] == []


@pytest.mark.parametrize("missing", ["torch", "uvicorn"])
def test_an_extra_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    done = CliRunner().invoke(cli, ["serve"])
    assert (done.exit_code, done.stderr.strip()) == (1, NEEDS)
    done = CliRunner().invoke(cli, ["serve", "--listen", "8000"])  # it is seen before that
    assert (done.exit_code, "'8000' is not HOST:PORT" in done.stderr) == (2, True)
