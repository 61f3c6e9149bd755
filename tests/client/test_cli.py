"""The command: prompt sources, flags, streams, exit codes."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import grpc
import pytest
from click.testing import CliRunner

from ssd.v1 import target_pb2
from ssd_client.cli import cli
from ssd_client.generate.request import TextPrompt, build_request
from ssd_client.generate.request_options import RequestOptions
from tests.client.every_option import FLAGS, on_the_wire
from tests.client.scripted_target import DRAWN_SEED, full_text, status
from tests.waiting import HANG_SECONDS

LOST = (grpc.StatusCode.UNAVAILABLE, "Socket closed")


def invoke(*arguments, stdin=b"", env=None):
    return CliRunner().invoke(cli, ["generate", *arguments], input=stdin, env=env)


def generate(server, *arguments, **settings):
    """Runs generate against `server`; the one request that it got."""
    result = invoke("--target", server.address, *arguments, **settings)
    assert result.exit_code == 0, result.stderr
    return server.requests[-1]


def client(*arguments, env=None, **settings):
    command = [sys.executable, "-m", "ssd_client", *arguments]
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTHONUNBUFFERED", None)  # it would hide a missing flush
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **settings}
    return subprocess.Popen(command, **{"stderr": subprocess.PIPE, "env": environment, **settings})


def test_the_text_goes_to_stdout_and_nothing_else(start):
    result = invoke("Once", "--target", start().address)
    assert (result.exit_code, result.stdout) == (0, full_text(12) + "\n")
    line = rf"12 tokens · first after .* tokens/s · length · seed {DRAWN_SEED}\n"
    assert re.fullmatch(line, result.stderr)


SPECULATION = {
    "mode": target_pb2.SPECULATION_MODE_SSD,
    "verification": target_pb2.VERIFICATION_MODE_COUPLED,
    "rounds": 4,
    "hits": 3,
    "cache_tokens": 8,
    "drafted_per_position": [3, 3, 3],
    "fallbacks": {"busy": 2},
}


def test_speculation_has_a_line_of_its_own_and_every_field_in_json(start):
    address = start(speculation=SPECULATION).address
    line = invoke("Once", "--target", address).stderr.splitlines()[1]
    assert line.startswith("speculation: 4 rounds · 3.0 tokens/round · 8 of 12 tokens from the")
    result = invoke("Once", "--target", address, "--json")
    zeros = {each.name: 0 for each in target_pb2.SpeculationStats.DESCRIPTOR.fields}
    said = {"mode": "ssd", "verification": "coupled", "tokens": 12, "accepted_per_position": []}
    assert json.loads(result.stdout)["speculation"] == {**zeros, **SPECULATION, **said}
    assert result.stderr == ""


def test_prompt_sources(start, tmp_path):
    server, path = start(), tmp_path / "prompt.txt"
    path.write_bytes("Zoë\r\n".encode())
    for arguments, stdin, text in (
        (["Once"], "", "Once"),
        (["Once"], "not asked for", "Once"),
        ([""], "", ""),
        (["--prompt-file", str(path)], "", "Zoë\r\n"),
        (["--prompt-file", "-"], "a\n", "a\n"),
        ([], "piped\n", "piped\n"),
    ):
        request = generate(server, *arguments, stdin=stdin)
        assert (request.WhichOneof("prompt"), request.text) == ("text", text)
    assert generate(server, "--token-ids", "1, 2").token_ids == b"\1\0\0\0\2\0\0\0"
    asked = generate(server, "--chat", "--system", "be brief", stdin="hi")
    told = [(each.role, each.content) for each in asked.chat.messages]
    assert told == [("system", "be brief"), ("user", "hi")]
    assert len(generate(server, "hi", "--chat").chat.messages) == 1


def test_every_flag_reaches_the_request(start):
    assert generate(start(), "x", "--timeout", "30", *FLAGS) == on_the_wire()


def test_environment_variables(start):
    server = start()
    env = {
        "TARGET": server.address,
        "SEED": "5",
        "TOP_P": "0.5",
        "STOP": "a b\nc",
        "STOP_TOKEN_ID": "1 2",
        "IGNORE_EOS": "1",
        "DRAFT": "h:1 h:2",
        "MODE": "ssd",
    }
    result = invoke("x", env={f"SSD_CLIENT_GENERATE_{name}": env[name] for name in env})
    assert result.exit_code == 0, result.stderr
    options = RequestOptions(seed=5, top_p=0.5, stop=["a b", "c"], stop_token_id=[1, 2],
                             ignore_eos=True, draft=["h:1", "h:2"], mode="ssd")  # fmt: skip
    assert server.requests == [build_request(TextPrompt("x"), options)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["a", "--prompt-file", "b"], "one prompt only, got PROMPT and --prompt-file"),
        (["a", "--token-ids", "1"], "one prompt only, got PROMPT and --token-ids"),
        (["--token-ids", "1", "--chat"], "--chat needs a prompt of text"),
        (["--token-ids", "1,,2"], "'' is not a token id"),
        (["--token-ids", "4294967296"], "is not a token id"),
        (["a", "--system", "b"], "--system needs --chat"),
        (["a", "--chat-template-kwargs", '{"x": 1}'], "--chat-template-kwargs needs --chat"),
        (["a", "--chat", "--chat-template-kwargs", "[1]"], "is no JSON object"),
        (["a", "--chat", "--chat-template-kwargs", "{x"], "is no JSON"),
        (["--prompt-file", "/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["--prompt-file", "/"], "/: Is a directory"),
        (["a", "--seed", str(2**64)], "--seed"),
        (["a", "--seed", "-1"], "--seed"),
        (["a", "--top-k", "x"], "'x' is not a whole number"),
        (["a", "--temperature", "nan"], "'nan' is not a finite number"),
        (["a", "--timeout", "0"], "--timeout"),
        (["a", "--logit-bias", "1"], "is not TOKEN=VALUE"),
        (["a", "--logit-bias", "1=1", "--logit-bias", "1=2"], "the same token twice"),
        (["a", "--target", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["a", "--logprobs"], "add --json"),
        (["a", "--local", "--target", "h:1"], "leave --target out"),
        (["a", "--local-model", "m"], "--local-model needs --local"),
        (["a", "--local-draft", "m"], "--local-draft needs --local"),
        (["a", "--local-device", "auto"], "--local-device needs --local"),
        (["a", "--local-draft-device", "cpu"], "--local-draft-device needs --local"),
        (["a", "--local-mps"], "--local-mps needs --local"),
        (["a", "--local-draft-share", "5"], "--local-draft-share needs --local"),
        (["a", "--local", "--local-device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["a", "--local", "--local-draft-share", "5"], "--local-draft-share needs --local-mps"),
        (["a", "--local", "--local-mps", "--local-draft-share", "0"], "'0' is not a whole number"),
        (["a", "--local", "--local-mps", "--local-draft-share", "101"], "--local-draft-share"),
        (
            ["a", "--local", "--local-mps", "--local-device", "cpu"],
            "--local-mps has both on one GPU: leave --local-device cpu out",
        ),
        (
            ["a", "--local", "--local-mps", "--local-draft-device", "cpu"],
            "--local-mps has both on one GPU: leave --local-draft-device cpu out",
        ),
        (
            ["a", "--local", "--local-mps", "--mode", "sync"],
            "--local-mps: with --mode sync the draft model is in the target's process",
        ),
        (
            ["a", "--local", "--local-draft-device", "cpu", "--draft", "h:1"],
            "--local-draft-device is for a draft that --local starts, not for --draft",
        ),
        (
            ["a", "--local", "--local-mps", "--local-model", "m"],
            "--local-mps needs a draft: name its model by --local-draft",
        ),
        (["a", "--local", "--mode", "sync", "--local-draft", "none"], "needs a draft model"),
        (["a", "--local", "--draft", "h:1", "--local-draft", "m"], "not both"),
        (["a", "--local", "--mode", "ssd", "--local-model", "m"], "ssd needs a draft"),
        (["a", "--local", "--mode", "ssd", "--local-draft", "none"], "ssd needs a draft"),
        (["a", "--draft", "nowhere"], "'nowhere' is not HOST:PORT"),
        (["a", "--mode", "fast"], "'fast' is not one of 'ssd', 'sync', 'off'"),
        (["a", "--verification", "none"], "--verification"),
        (["a", "--depth", "0"], "--depth"),
        (["a", "--down-weight", "inf"], "--down-weight"),
        (["a", "b"], "unexpected extra argument"),
        (["a", "--nope"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize("source", ["a file", "standard input", "an argument"])
def test_invalid_utf8_is_named_with_its_place(tmp_path, source):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    given = {"a file": ["--prompt-file", path], "standard input": [], "an argument": [b"ab\xff"]}
    process = client("generate", *given[source], stdin=subprocess.PIPE)
    _, stderr = process.communicate(b"ab\xff", timeout=HANG_SECONDS)
    assert (process.returncode, b"not valid UTF-8 at byte 2" in stderr) == (2, True), stderr


def test_other_failures_have_exit_code_1(start, nobody):
    server = start(refuse=status(grpc.StatusCode.INTERNAL, "two\nlines\x1b[2J"))
    for address, problem in (
        (nobody, "cannot connect: Connection refused; nobody listens there: --local starts a "
         "target and a draft here"),
        (server.address, "two lines�[2J"),
    ):  # fmt: skip
        result = invoke("x", "--target", address)
        assert (result.exit_code, result.stderr) == (1, f"error: {address}: {problem}\n")


def test_what_arrived_before_a_failure_is_kept(start):
    server = start(abort_after=(3, *LOST))
    result = invoke("x", "--target", server.address)
    assert (result.exit_code, result.stdout) == (1, full_text(2) + "\n")
    assert result.stderr.startswith(f"error: {server.address} lost after 3 tokens (Socket closed)")
    result = invoke("x", "--target", server.address, "--json")
    content = json.loads(result.stdout)
    assert (result.exit_code, content["text"], content["finish_reason"]) == (1, full_text(2), None)


@pytest.mark.parametrize("retries", [[], ["--retries", "1"]])
def test_a_lost_request_goes_on_and_says_so(start, retries):
    first, second = start(abort_after=(7, *LOST)), start()
    addresses = [first.address] if retries else [first.address, second.address]
    targets = [word for address in addresses for word in ("--target", address)]
    result = invoke("x", *targets, *retries)
    assert (result.exit_code, result.stdout) == (0, full_text(12) + "\n"), result.stderr
    assert result.stderr.endswith(" · resumed once\n")


def in_terminal(*arguments):
    """Runs the client with stdout and stderr on one terminal; what it showed, and its end."""
    ours, theirs = pty.openpty()
    process = client(*arguments, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # at its end
        while data := screen.read(65536):
            shown += data
    return shown.decode().replace("\r\n", "\n"), process.wait(HANG_SECONDS)


def test_a_move_is_noted_in_a_terminal(start):
    first, second = start(abort_after=(3, *LOST)), start()
    targets = ("--target", first.address, "--target", second.address)
    shown, _ = in_terminal("generate", "x", *targets)
    assert f"{first.address} lost after 3 tokens, resuming on {second.address}" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\x1b]0;evil\x07b\r", "a�]0;evil�b"), ("run \u202etxt.hs\u202c", "run �txt.hs�")],
)
def test_text_cannot_drive_the_terminal(start, text, shown):
    """Nor reorder what it shows; where it goes elsewhere, it is as it was."""
    target = ("--target", start(tokens=1, text=text).address)
    assert in_terminal("generate", "x", *target)[0].startswith(f"{shown}\n")
    assert invoke("x", *target).stdout_bytes == f"{text}\n".encode()


def test_text_is_written_as_it_comes(start):
    server = start(hang_after=4)
    process = client("generate", "x", "--target", server.address)
    expected = full_text(3).encode()
    assert process.stdout.read(len(expected)) == expected
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, rest) == (130, b"\n")
    assert re.fullmatch(rb"(?s).*4 tokens.*interrupted.*", stderr)
    assert b"Traceback" not in stderr
    assert server.cancelled.wait(HANG_SECONDS)


def test_an_interrupted_json_generation_is_printed(start):
    lost, server = start(abort_after=(2, *LOST)), start(hang_after=4)
    targets = ("--target", lost.address, "--target", server.address)
    ours, theirs = pty.openpty()
    process = client("generate", "x", "--json", *targets, stderr=theirs)
    assert os.read(ours, 1)  # it notes the move: its text has begun
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert full_text(12).startswith(json.loads(stdout)["text"])


STUCK = """
import threading, click
from ssd_client import cli

def interrupted(*args, **extra):
    threading.Thread(target=threading.Event().wait).start()  # as one inside gRPC may be
    print("what was said before", end="")
    raise click.Abort

click.Group.main = interrupted
cli.main()
"""


def test_a_thread_that_does_not_end_does_not_hold_up_an_interrupt():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout) == (130, b"what was said before")


def test_a_reader_that_has_enough_ends_it_quietly(start):
    server = start(tokens=1000, pause_s=0.02)
    process = client("generate", "x", "--target", server.address)
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(HANG_SECONDS) == 1
    assert server.cancelled.wait(HANG_SECONDS)


def test_a_full_disk_is_said(start):
    with open("/dev/full", "wb") as full_disk:
        process = client("generate", "x", "--target", start().address, stdout=full_disk)
        _, stderr = process.communicate(timeout=HANG_SECONDS)
    said = b"error: cannot write to standard output: No space left on device\n"
    assert (process.returncode, stderr) == (1, said)


def test_info(start):
    server = start()
    result = CliRunner().invoke(cli, ["info", "--target", server.address])
    assert result.exit_code == 0
    for row in (
        r"num parameters +3,000,000,000",
        r"fingerprint +f{64}",
        r"speculation modes +ssd, off",
        r".* 127.0.0.1:7510 up \(tiny, 3 sequences\)",
        r".* gpu-2:7510 refused \(another tokenizer\)",
    ):
        assert re.search(rf"^{row} *$", result.stdout, re.MULTILINE), row
    result = CliRunner().invoke(cli, ["info", "--target", server.address, "--json"])
    content = json.loads(result.stdout)
    assert (content["eos_token_ids"], content["speculation_modes"]) == ([1, 2], ["ssd", "off"])
    assert content["speculation_endpoints"][0]["open_sequences"] == 3
    assert content["load"]["running"] == 0


def test_a_proxy_is_not_asked_for_this_machine(start, nobody):
    server = start()
    env = {"http_proxy": f"http://{nobody}", "no_proxy": ""}
    process = client("generate", "x", "--target", server.address, env=env)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert stdout.decode() == full_text(12) + "\n", stderr


def test_help_names_every_way_in():
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    assert re.search("(?s)generate.*SSD_CLIENT_GENERATE_TOP_P", result.stdout)
    groups = [line for line in invoke("--help").stdout.splitlines() if re.match(r"\w.*:$", line)]
    assert groups[:4] == ["Options:", "Prompt:", "Sampling:", "Length and end:"]
    assert groups[-1] == "Services that are started here:"
