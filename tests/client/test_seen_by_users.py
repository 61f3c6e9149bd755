"""bench, compare, status and chat against the real services, as a person uses them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted_target import Running

from ssd.v1 import target_pb2
from tests.processes import DraftProcess, TargetProcess, target

pytestmark = pytest.mark.services

CLIENT = [sys.executable, "-m", "ssd_client"]
Pair = tuple[TargetProcess, DraftProcess]


@pytest.fixture
def pair(traced_pair: Pair) -> Pair:
    return traced_pair


def run(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLIENT, *arguments], capture_output=True, text=True, timeout=timeout)


# bench


def bench(pair: Pair, *more: str) -> list[str]:
    short = ("--num-prompts", "2", "--max-tokens", "24", "--repeat", "2", "--ignore-eos")
    return ["bench", "--target", pair[0].address, *short, *more]


def test_three_modes_one_table_one_report(pair: Pair, tmp_path: Path) -> None:
    out, page, trace = (tmp_path / name for name in ("out.json", "out.html", "trace.json"))
    done = run(*bench(pair, "--out", str(out), "--report", str(page), "--trace", str(trace)))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^off .*\n(.*\n)*sync .*\n(.*\n)*ssd ", done.stdout, re.MULTILINE)
    assert "all 10 equal those of off" in done.stdout
    assert "predicted tokens/s" in done.stdout
    content = json.loads(out.read_text())
    assert content["complete"] is True
    assert len(content["runs"]) == 6
    # Equality by never speculating is no result. How many rounds the draft is asked for is a matter
    # of the machine's pace.
    ssd = next(row for row in content["summary"] if row["mode"] == "ssd")
    assert ssd["spec_decode_accepted_tokens"]["low"] > 0
    assert sum(ssd[name]["low"] for name in ("hits", "late_rounds", "missed_rounds")) > 0
    assert content["target"]["name"] == "stories-target"
    assert content["theory"]["ssd"] > 0
    for mode in ("off", "sync", "ssd"):
        assert any(e["kind"] == "forward" for e in content["timelines"][mode])
    assert 'id="ssd-draft-forward' in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"forward", "process_name"}


def test_an_interrupted_benchmark_goes_on_where_it_was(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    modes = ("--mode", "off", "--mode", "ssd")
    command = [*CLIENT, *bench(pair, "--out", str(out), *modes, "--repeat", "5")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    half = json.loads(out.read_text())
    assert half["complete"] is False
    assert 1 <= len(half["runs"]) < 10
    assert "interrupted" in said
    done = run(*command[len(CLIENT) :], "--resume")
    assert done.returncode == 0, done.stderr
    whole = json.loads(out.read_text())
    assert whole["complete"] is True
    assert whole["runs"][: len(half["runs"])] == half["runs"]
    assert len(whole["runs"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: No such file"),
        (["--out", "nowhere/out.json"], "--out nowhere/out.json: its folder does not exist"),
        (["--resume"], "--resume needs --out"),
        (["--concurrency", "1,0"], "whole number in 1.."),
        (["--request-rate", "-1"], "numbers above 0"),
        (["--baseline", "http://x"], "openai:http://HOST:PORT/v1"),
        (["--local-expand-to", "hidden=64"], "--local-expand-to needs --local"),
        (["--link-delay", "5"], "--link-delay needs --local"),
    ],
)
def test_bad_input_names_the_option(arguments: list[str], message: str) -> None:
    done = run("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_endpoint_that_is_down_is_one_line(nobody: str) -> None:
    done = run("bench", "--target", nobody)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert nobody in done.stderr


def test_a_benchmark_says_why_it_has_no_prediction(pair: Pair) -> None:
    done = run("bench", "--target", pair[0].address, "--num-prompts", "1", "--max-tokens", "4",
               "--repeat", "1", "--concurrency", "2", "--warm-up", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no prediction: theorem 7 is of one request at a time" in done.stderr
    assert "predicted" not in done.stdout


def test_texts_that_depend_on_the_mode_fail_the_benchmark(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """The scripted target draws other tokens when it speculates."""
    broken = start(tokens=8, by_mode=True)
    out = tmp_path / "out.json"
    done = run("bench", "--target", broken.address, "--mode", "off", "--mode", "ssd",
               "--num-prompts", "2", "--repeat", "1", "--out", str(out))  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "TEXTS DIFFER: 0 of 2 are equal" in done.stdout
    assert json.loads(out.read_text())["equality"]["differences"][0]["position"] == 0


def test_a_target_that_fails_leaves_the_results_that_were_there(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text("precious")
    failing = start(abort_after=(2, grpc.StatusCode.INTERNAL, "broken"))
    done = run("bench", "--target", failing.address, "--mode", "off", "--out", str(out))
    assert done.returncode == 1
    assert "broken" in done.stderr
    assert out.read_text() == "precious"


# compare, models, status


def test_two_modes_compare_equal(pair: Pair) -> None:
    done = run("compare", "--target", pair[0].address, "--num-prompts", "2", "--max-tokens", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 of 2 equal")


def test_a_difference_is_named_with_its_gap(pair: Pair, start: Callable[..., Running]) -> None:
    other = start(tokens=16)
    done = run("compare", "--target", pair[0].address, "--target", other.address,
               "--num-prompts", "1", "--max-tokens", "16", "--json")  # fmt: skip
    assert done.returncode == 1, done.stderr
    (difference,) = json.loads(done.stdout)["differences"]
    assert difference["position"] == 0
    assert difference["first"].startswith("token ")


def test_status_tells_health_links_and_rates(pair: Pair, nobody: str) -> None:
    run("generate", "Once", "--target", pair[0].address, "--max-tokens", "24", "--mode", "ssd")
    done = run("status", "--target", pair[0].address, "--json")
    serving, drafting = json.loads(done.stdout)["services"]
    assert (serving["health"], drafting["health"]) == ("ready", "ready")
    assert serving["rounds"] > 0
    assert serving["hit_rate"] is not None
    assert serving["links"][0]["address"] == pair[1].address
    assert drafting["links"] == 1
    table = run("status", "--target", pair[0].address, "--target", nobody)
    assert table.returncode == 1
    assert "stories-draft" in table.stdout
    assert "cannot connect" in table.stdout
    listed = run("models", "--target", pair[0].address)
    assert listed.returncode == 0
    assert "8.9M" in listed.stdout


# chat


class Terminal:
    """A chat at the other end of a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*CLIENT, "chat", *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # it controls the session
            env=environment,
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Until it is on the screen; what came up to it is taken away."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.screen)) is None:
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._master], [], [], left)[0]
            assert ready, f"{pattern!r} did not come: {self.screen!r}"
            with contextlib.suppress(OSError):
                self.screen += os.read(self._master, 65536).decode("utf-8", "replace")
        before, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return before

    def look(self, seconds: float) -> None:
        """At what comes within so many seconds."""
        while select.select([self._master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.screen += os.read(self._master, 65536).decode("utf-8", "replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(*arguments)) as found:
        yield found


def test_a_chat_in_a_terminal(pair: Pair) -> None:
    flags = ("--target", pair[0].address, "--metrics", "--show-origin", "--seed", "3")
    with terminal(*flags, "--temperature", "0.5", "--max-tokens", "40") as chat:
        chat.wait_for(r"from the cache[\s\S]*> ")
        chat.type("Tell me a story about a fox.\r")
        reply = chat.wait_for(r"tokens/s · (stop|length)")
        assert re.search(r"\x1b\[3[0-9]m", reply)  # tokens have colours
        chat.wait_for("> ")
        chat.type("/mode off\r")
        chat.wait_for("mode: off")
        chat.wait_for("> ")
        chat.type("\x1b[A\x1b[A\r")  # the line before the last
        chat.wait_for("Tell me a story about a fox")
        chat.wait_for(r"tokens/s · (stop|length)")
        chat.wait_for("> ")
        chat.type("/stats\r")
        assert "2 replies" in chat.wait_for("by the target alone")
        chat.wait_for("> ")
        chat.type("\x04")  # Ctrl-D
        assert chat.process.wait(20) == 0


def test_ctrl_c_stops_a_reply_and_not_the_chat(pair: Pair) -> None:
    flags = ("--target", pair[0].address, "--mode", "off", "--max-tokens", "900", "--metrics")
    with terminal(*flags, "--temperature", "1") as chat:
        chat.wait_for("> ")
        chat.type("Tell me a very long story about two bears.\r")
        chat.wait_for(r"bears\.\s+\S+ \S+ \S+")
        chat.type("\x03")
        chat.wait_for(r"tokens.* · stopped|stop · seed")
        chat.wait_for("> ")
        # At the prompt it says how to leave. A signal in the very moment in which a prompt appears
        # may be heard with the next key only: that is readline's.
        while "Ctrl-D ends the chat" not in chat.screen:
            chat.type("\x03")
            chat.look(1.0)
        chat.type("/quit\r")
        assert chat.process.wait(20) == 0


def test_a_target_that_is_started_anew_between_two_turns_is_survived(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    listen = ("--listen", f"127.0.0.1:{port}")
    flags = ("--target", f"127.0.0.1:{port}", "--metrics", "--max-tokens", "16", "--seed", "1")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(target(tmp_path / "one", *listen))
        chat = stack.enter_context(terminal(*flags))
        chat.wait_for("> ")
        chat.type("Tell me a story.\r")
        chat.wait_for(r"tokens/s · (stop|length)")
        first.kill()
        stack.enter_context(target(tmp_path / "two", *listen, ready=False))
        chat.type("And then?\r")
        chat.wait_for(r"tokens/s · (stop|length)", 120)
        chat.type("/quit\r")
        assert chat.process.wait(20) == 0


def test_a_chat_can_be_piped(pair: Pair) -> None:
    said = "Tell me a story.\n/nonsense\n/stats\n"
    done = subprocess.run(
        [*CLIENT, "chat", "--target", pair[0].address, "--max-tokens", "12", "--show-origin"],
        input=said, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.strip()
    assert "/nonsense is not known" in done.stderr
    assert "1 replies · 12 tokens" in done.stderr


# Acceptance that is made up


def test_synthetic_acceptance_is_marked_everywhere(tmp_path: Path) -> None:
    flags = ("--draft-model", "stories-draft", "--synthetic-acceptance", "0.9", "--no-adapt-depth")
    with target(tmp_path, *flags) as serving:
        assert "texts are not the model's" in serving.log()
        info: Any = serving.stub().GetModelInfo(target_pb2.GetModelInfoRequest())
        assert "synthetic-0.9" in info.fingerprint
        done = run("generate", "Once", "--target", serving.address, "--max-tokens", "120",
                   "--ignore-eos", "--mode", "sync", "--json")  # fmt: skip
        stats = json.loads(done.stdout)["speculation"]
        assert stats["synthetic_acceptance"] == pytest.approx(0.9)
        first = stats["accepted_per_position"][0] / stats["drafted_per_position"][0]
        assert 0.7 < first <= 1.0
        shown = run("bench", "--target", serving.address, "--num-prompts", "1", "--repeat", "1",
                    "--max-tokens", "8")  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert "SYNTHETIC acceptance 0.9" in shown.stdout
        refused = run("generate", "Once", "--target", serving.address, "--logprobs", "--json")
        assert refused.returncode == 2
        assert "logprobs" in refused.stderr
