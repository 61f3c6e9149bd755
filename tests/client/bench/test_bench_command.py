"""The command bench against scripted targets: its input, its interruption, its failures."""

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import click.testing
import grpc
import pytest

from ssd_client.cli import cli
from tests.client.scripted_target import ScriptedTarget, silence
from tests.client.terminal import CLIENT
from tests.waiting import HANG_SECONDS


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, arguments)


def test_an_interrupted_benchmark_goes_on_where_it_was(
    start: Callable[..., ScriptedTarget], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    # Each prompt once before, then two runs, and the first request of the third.
    passing, held = iter(range(2 + 2 * 2 + 1)), threading.Event()

    def hold_one(context: grpc.ServicerContext) -> None:
        if next(passing, None) is None and not held.is_set():
            held.set()
            silence(context)

    server = start(refuse=hold_one)
    # fmt: off
    flags = ["bench", "--target", server.address, "--mode", "off", "--mode", "ssd",
             "--num-prompts", "2", "--repeat", "5", "--warm-up", "0", "--out", str(out)]
    # fmt: on
    process = subprocess.Popen([*CLIENT, *flags], stdout=subprocess.PIPE, text=True)
    assert held.wait(HANG_SECONDS)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    half = json.loads(out.read_text())
    assert (half["complete"], len(half["runs"])) == (False, 2)
    assert "interrupted" in said
    done = run(*flags, "--resume")
    assert done.exit_code == 0, done.stderr
    whole = json.loads(out.read_text())
    assert (whole["complete"], len(whole["runs"])) == (True, 10)
    assert whole["runs"][:2] == half["runs"]


def test_texts_that_follow_a_schema(start: Callable[..., ScriptedTarget], tmp_path: Path) -> None:
    schema, out = tmp_path / "schema.json", tmp_path / "out.json"
    schema.write_text('{"type": "object"}')
    server = start()
    # fmt: off
    flags = ["bench", "--target", server.address, "--mode", "off", "--num-prompts", "2",
             "--repeat", "1", "--json-schema", str(schema), "--out", str(out)]
    # fmt: on
    done = run(*flags)
    assert done.exit_code == 0, done.stderr
    assert {request.grammar.json_schema for request in server.requests} == {schema.read_text()}
    assert json.loads(out.read_text())["settings"]["json_schema"] == schema.read_text()
    schema.write_text("{")
    assert "--json-schema is no JSON" in run(*flags).stderr
    assert "--ignore-eos: a text that follows" in run(*flags, "--ignore-eos").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "x.jsonl"], "--data x.jsonl: No such file"),
        (["--data", "x"], "stories, humaneval, gsm8k"),
        (["--out", "/tmp"], "--out /tmp: a file is needed, this is a folder"),
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
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_texts_that_depend_on_the_mode_fail_the_benchmark(
    start: Callable[..., ScriptedTarget], tmp_path: Path
) -> None:
    """The scripted target draws other tokens when it speculates."""
    broken = start(tokens=8, by_mode=True)
    out = tmp_path / "out.json"
    done = run("bench", "--target", broken.address, "--mode", "off", "--mode", "ssd",
               "--num-prompts", "2", "--repeat", "1", "--out", str(out))  # fmt: skip
    assert done.exit_code == 1, done.stderr
    assert "TEXTS DIFFER: 0 of 2 are equal" in done.stdout
    assert json.loads(out.read_text())["equality"]["differences"][0]["position"] == 0


def test_a_target_that_fails_leaves_the_results_that_were_there(
    start: Callable[..., ScriptedTarget], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text("precious")
    failing = start(abort_after=(2, grpc.StatusCode.INTERNAL, "broken"))
    done = run("bench", "--target", failing.address, "--mode", "off", "--out", str(out))
    assert (done.exit_code, "broken" in done.stderr) == (1, True)
    assert out.read_text() == "precious"
