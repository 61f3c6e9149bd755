"""The command: prompt sources, flags, streams, exit codes."""

from __future__ import annotations

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
from ssd_client.generate import stream
from ssd_client.generate.events import Tokens
from tests.client.scripted_target import DRAWN_SEED, full_text, full_tokens, invalid, status
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
    server = start()
    result = invoke("Once", "--target", server.address)
    assert result.exit_code == 0
    assert result.stdout == full_text(12) + "\n"
    assert result.stderr.startswith("12 tokens · first after ")
    assert result.stderr.endswith(f" tokens/s · length · seed {DRAWN_SEED}\n")
    assert result.stderr.count("\n") == 1


def test_json(start):
    server = start(stopped_by=7)
    result = invoke("Once", "--target", server.address, "--json", "--top-logprobs", "2")
    assert result.exit_code == 0
    assert result.stderr == ""
    content = json.loads(result.stdout)
    assert content["text"] == full_text(12)
    assert content["token_ids"] == full_tokens(12)
    assert (content["finish_reason"], content["stopped_by"]) == ("stop", 7)
    assert content["seed"] == DRAWN_SEED
    assert content["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "cached_prompt_tokens": 2,
    }
    assert content["timing"].keys() == {"ttft_ms", "tokens_per_s", "total_ms"}
    assert len(content["logprobs"]) == 12
    assert content["logprobs"][0]["top"][1] == {"token_id": 1, "logprob": None}
    assert (content["endpoints"], content["resumed"]) == ([server.address], 0)


SPECULATION = {
    "mode": target_pb2.SPECULATION_MODE_SSD,
    "verification": target_pb2.VERIFICATION_MODE_COUPLED,
    "rounds": 4,
    "hits": 3,
    "cache_rounds": 3,
    "plain_rounds": 1,
    "drafted_tokens": 9,
    "accepted_tokens": 8,
    "cache_tokens": 8,
    "drafted_per_position": [3, 3, 3],
    "accepted_per_position": [3, 3, 2],
}


def test_speculation_has_a_line_of_its_own(start):
    result = invoke("Once", "--target", start(speculation=SPECULATION).address)
    assert result.stdout == full_text(12) + "\n"
    line, speculation = result.stderr.splitlines()
    assert line.startswith("12 tokens · ")
    assert speculation == (
        "speculation: 4 rounds · 3.0 tokens/round · 8 of 12 tokens from the cache · "
        "hit rate 100 % · acceptance 89 %"
    )


def test_plain_decoding_has_no_line_of_speculation(start):
    plain = {"mode": target_pb2.SPECULATION_MODE_OFF, "rounds": 12, "plain_rounds": 12}
    result = invoke("Once", "--target", start(speculation=plain).address)
    assert result.stderr.count("\n") == 1


def test_json_has_every_field_of_the_speculation(start):
    server = start(speculation={**SPECULATION, "fallbacks": {"busy": 2}})
    result = invoke("Once", "--target", server.address, "--json")
    content = json.loads(result.stdout)["speculation"]
    names = [each.name for each in target_pb2.SpeculationStats.DESCRIPTOR.fields]
    zeros = dict.fromkeys(names, 0)
    said = {"mode": "ssd", "verification": "coupled", "fallbacks": {"busy": 2}, "tokens": 12}
    assert content == {**zeros, **SPECULATION, **said}
    assert result.stderr == ""


def test_prompt_sources(start, tmp_path):
    server = start()
    path = tmp_path / "prompt.txt"
    path.write_bytes("Zoë\r\n".encode())
    assert generate(server, "Once").text == "Once"
    assert generate(server, "").WhichOneof("prompt") == "text"
    assert generate(server, "--prompt-file", str(path)).text == "Zoë\r\n"
    assert generate(server, "--prompt-file", "-", stdin="a\n").text == "a\n"
    assert generate(server, stdin="piped\n").text == "piped\n"
    assert generate(server, "Once", stdin="not asked for").text == "Once"
    assert generate(server, "--token-ids", "1, 2").token_ids == b"\1\0\0\0\2\0\0\0"


def test_chat(start):
    server = start()
    user = target_pb2.ChatMessage(role="user", content="hi")
    system = target_pb2.ChatMessage(role="system", content="be brief")
    assert list(generate(server, "hi", "--chat").chat.messages) == [user]
    asked = generate(server, "--chat", "--system", "be brief", stdin="hi")
    assert list(asked.chat.messages) == [system, user]


def test_every_flag_reaches_the_request(start):
    # fmt: off
    request = generate(
        start(), "x", "--temperature", "0.5", "--top-k", "7", "--top-p", "0.25", "--min-p", "0.125",
        "--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.75",
        "--logit-bias", "3=-100", "--logit-bias", "4=1.5", "--seed", str(2**64 - 1),
        "--max-tokens", "9", "--min-tokens", "4", "--stop", "a b", "--stop", "\n",
        "--stop-token-id", "5", "--stop-token-id", "6", "--ignore-eos", "--logprobs",
        "--json", "--request-id", "r1", "--timeout", "30", "--mode", "sync", "--draft", "h:1",
        "--draft", "[::1]:2", "--depth", "6",
        "--verification", "coupled", "--down-weight", "0.25", "--cache-salt", "s1",
    )
    # fmt: on
    assert request == target_pb2.GenerateRequest(
        request_id="r1",
        cache_salt="s1",
        text="x",
        sampling=target_pb2.SamplingOptions(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            logit_bias={3: -100.0, 4: 1.5},
            seed=2**64 - 1,
        ),
        stop=target_pb2.StopOptions(
            max_tokens=9,
            min_tokens=4,
            strings=["a b", "\n"],
            token_ids=[5, 6],
            ignore_eos=True,
        ),
        logprobs=target_pb2.LogprobOptions(chosen=True),
        speculation=target_pb2.SpeculationOptions(
            mode=target_pb2.SPECULATION_MODE_SYNC,
            verification=target_pb2.VERIFICATION_MODE_COUPLED,
            depth=6,
            endpoints=["h:1", "[::1]:2"],
            down_weight=0.25,
        ),
    )


def test_no_flag_sets_nothing(start):
    assert generate(start(), "x") == target_pb2.GenerateRequest(text="x")


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
    (request,) = server.requests
    assert (request.sampling.seed, request.sampling.top_p) == (5, 0.5)
    assert list(request.stop.strings) == ["a b", "c"]
    assert list(request.stop.token_ids) == [1, 2]
    assert request.stop.ignore_eos
    assert list(request.speculation.endpoints) == ["h:1", "h:2"]
    assert request.speculation.mode == target_pb2.SPECULATION_MODE_SSD


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
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_invalid_utf8_is_named_with_its_place(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    assert (
        f"error: {path}: not valid UTF-8 at byte 2\n" == invoke("--prompt-file", str(path)).stderr
    )
    result = invoke(stdin=b"\xc3")
    assert result.stderr == "error: standard input: not valid UTF-8 at byte 0\n"
    assert result.exit_code == 2


def test_invalid_utf8_in_an_argument():
    process = client("generate", b"\xc3\xa9\xff")
    _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert b"not valid UTF-8 at byte 2" in stderr


def test_a_field_violation(start):
    text = "sampling.top_p: must be in (0, 1], got 1.5"
    server = start(refuse=invalid(text, "sampling.top_p", "must be in (0, 1], got 1.5"))
    result = invoke("x", "--target", server.address, "--top-p", "1.5")
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"error: {text}\n", "")


def test_other_failures_have_exit_code_1(start, nobody):
    result = invoke("x", "--target", nobody)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {nobody}: cannot connect: Connection refused; nobody listens there: --local "
        "starts a target and a draft here\n"
    )
    server = start(refuse=status(grpc.StatusCode.INTERNAL, "two\nlines\x1b[2J"))
    result = invoke("x", "--target", server.address)
    assert result.stderr == f"error: {server.address}: two lines�[2J\n"
    assert result.exit_code == 1


def test_what_arrived_before_a_failure_is_kept(start):
    server = start(abort_after=(3, *LOST))
    result = invoke("x", "--target", server.address)
    assert result.exit_code == 1
    assert result.stdout == full_text(2) + "\n"
    assert result.stderr.startswith(f"error: {server.address} lost after 3 tokens (Socket closed)")
    result = invoke("x", "--target", server.address, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert (content["text"], content["finish_reason"]) == (full_text(2), None)


def test_failover_and_its_statistics(start):
    first, second = start(abort_after=(3, *LOST)), start()
    targets = ["--target", first.address, "--target", second.address]
    result = invoke("x", *targets)
    assert result.exit_code == 0
    assert result.stdout == full_text(12) + "\n"
    assert result.stderr.endswith(" · resumed once\n")
    content = json.loads(invoke("x", *targets, "--json").stdout)
    assert (content["text"], content["resumed"]) == (full_text(12), 1)
    assert content["endpoints"] == [first.address, second.address]


def test_the_speculation_of_a_lost_part_is_not_made_up(start):
    first, second = start(abort_after=(3, *LOST)), start(speculation={**SPECULATION, "rounds": 3})
    result = invoke("x", "--target", first.address, "--target", second.address)
    assert result.stderr.splitlines()[-1].startswith(
        "speculation after the resume: 3 rounds · 3.0 tokens/round · 8 of 9 tokens from the cache"
    )


def test_retries_resume_on_the_only_endpoint(start):
    server = start(abort_after=(7, *LOST))
    result = invoke("x", "--target", server.address, "--retries", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == full_text(12) + "\n"


def test_piped_text_is_raw(start):
    server = start(tokens=1, text="\x1b[31m\r\n")
    assert invoke("x", "--target", server.address).stdout_bytes == b"\x1b[31m\r\n\n"


def in_terminal(*arguments):
    """Runs the client with stdout and stderr on one terminal; what it showed, and its end."""
    ours, theirs = pty.openpty()
    process = client(*arguments, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux's end of file
            data = b""
        if not data:
            break
        shown += data
    os.close(ours)
    return shown.decode().replace("\r\n", "\n"), process.wait(HANG_SECONDS)


def test_a_move_is_noted_in_a_terminal(start):
    first, second = start(abort_after=(3, *LOST)), start()
    shown, code = in_terminal(
        "generate", "x", "--target", first.address, "--target", second.address
    )
    assert code == 0
    assert f"{first.address} lost after 3 tokens, resuming on {second.address}" in shown


def test_text_cannot_drive_the_terminal(start):
    server = start(tokens=1, text="a\x1b]0;evil\x07b")
    shown, _ = in_terminal("generate", "x", "--target", server.address)
    assert shown.startswith("a�]0;evil�b\n")


def test_text_cannot_be_reordered_in_the_terminal(start):
    server = start(tokens=1, text="run \u202etxt.hs\u202c")
    shown, _ = in_terminal("generate", "x", "--target", server.address)
    assert shown.startswith("run �txt.hs�\n")
    assert invoke("x", "--target", server.address).stdout_bytes.startswith(b"run \xe2\x80\xae")


def test_text_is_written_as_it_comes(start):
    server = start(hang_after=4)
    process = client("generate", "x", "--target", server.address)
    expected = full_text(3).encode()
    assert process.stdout.read(len(expected)) == expected
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, rest) == (130, b"\n")
    assert b"4 tokens" in stderr
    assert b"interrupted" in stderr
    assert b"Traceback" not in stderr
    assert server.target.cancelled.wait(HANG_SECONDS)


def test_an_interrupted_json_generation_is_printed(start, monkeypatch):
    real = stream.generate

    def interrupted_after_four(*arguments, **settings):
        tokens = 0
        for event in real(*arguments, **settings):
            yield event
            tokens += isinstance(event, Tokens)
            if tokens == 4:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stream, "generate", interrupted_after_four)
    result = invoke("x", "--json", "--target", start(hang_after=4).address)
    assert result.exit_code == 130
    assert json.loads(result.stdout)["text"] == full_text(3)


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
    assert server.target.cancelled.wait(HANG_SECONDS)


def test_a_full_disk_is_said(start):
    with open("/dev/full", "wb") as full_disk:
        process = client("generate", "x", "--target", start().address, stdout=full_disk)
        _, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert stderr == b"error: cannot write to standard output: No space left on device\n"


def test_info(start):
    server = start()
    result = CliRunner().invoke(cli, ["info", "--target", server.address])
    assert result.exit_code == 0
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert rows["num parameters"].strip() == "3,000,000,000"
    assert rows["fingerprint"].strip() == "f" * 64
    assert rows["speculation modes"].strip() == "ssd, off"
    assert rows["max speculation depth"].strip() == "8"
    assert [line.strip().split("  ")[-1] for line in result.stdout.splitlines()[-2:]] == [
        "127.0.0.1:7510 up (tiny, 3 sequences)",
        "gpu-2:7510 refused (another tokenizer)",
    ]
    result = CliRunner().invoke(cli, ["info", "--target", server.address, "--json"])
    content = json.loads(result.stdout)
    assert content["num_parameters"] == 3_000_000_000
    assert content["eos_token_ids"] == [1, 2]
    assert content["speculation_modes"] == ["ssd", "off"]
    assert content["speculation_endpoints"][0] == {
        "address": "127.0.0.1:7510",
        "state": "up",
        "draft_name": "tiny",
        "reason": "",
        "open_sequences": 3,
        "payoff": "",
        "acceptance": 0.0,
        "source": "",
        "planes": [],
    }
    assert content["load"]["running"] == 0


def test_info_of_an_unreachable_target(nobody):
    result = CliRunner().invoke(cli, ["info", "--target", nobody])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: {nobody}: cannot connect")


def test_a_proxy_is_not_asked_for_this_machine(start, nobody):
    server = start()
    env = {"http_proxy": f"http://{nobody}", "no_proxy": ""}
    process = client("generate", "x", "--target", server.address, env=env)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert stdout.decode() == full_text(12) + "\n", stderr


def test_the_client_is_thin():
    heavy = "torch transformers numpy safetensors msgspec ssd_target ssd_engine ssd_draft"
    code = f"import sys, ssd_client.cli; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_names_every_way_in():
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    assert "generate" in result.stdout
    assert "SSD_CLIENT_GENERATE_TOP_P" in result.stdout


def test_help_shows_options_in_groups():
    groups = [line for line in invoke("--help").stdout.splitlines() if re.match(r"\w.*:$", line)]
    assert groups[:4] == ["Options:", "Prompt:", "Sampling:", "Length and end:"]
    assert groups[-1] == "Services that are started here:"
