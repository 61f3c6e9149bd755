"""What services log: JSON where asked for, the life of requests, and no text of anybody's."""

import json
import logging
import re
import subprocess
import sys
from typing import Any

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd_engine.process.log import TextLines
from tests.deploy.watched import PROMPT, Bereft, Pair
from tests.processes import collect, wait_until_idle
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

SECRET = "Brumblewick"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def of_request(pair: Pair, request_id: str) -> list[dict[str, Any]]:
    """To its end, whose line may come a moment after the client has heard of it."""

    def found() -> list[dict[str, Any]]:
        whole = pair.target.log().rpartition("\n")[0]  # the last line may be half written
        return [line for line in lines(whole) if line.get("request_id") == request_id]

    wait_until(lambda: found() and "outcome" in found()[-1], pair.target.log)
    return found()


def test_every_line_of_every_process_is_an_object(watched: Pair) -> None:
    watched.generate()
    with pytest.raises(grpc.RpcError):
        watched.generate("Once " * 3000)  # of which the tokenizer has something to say, too
    for role, log in zip(("target", "draft"), watched.logs(), strict=True):
        found = lines(log)
        for line in found:
            assert TIME.fullmatch(line["time"])
            assert line["level"] in ("debug", "info", "warning", "error", "critical")
            assert line["role"] == role
            assert line["logger"]
            assert isinstance(line["message"], str)
        ranks = {None, 0, 1} if role == "target" and FULL else {None, 0}
        assert {line.get("rank") for line in found} == ranks
        assert any("link" in line for line in found)


def test_a_request_has_a_start_and_an_end(watched: Pair) -> None:
    out = watched.generate(request_id="logged-1")
    start, end = of_request(watched, "logged-1")
    assert (start["level"], end["level"]) == ("debug", "info")
    assert start["sequence"] == end["sequence"]
    assert end["outcome"] == "length"
    assert end["tokens"] == len(out.tokens) == 64
    assert end["prompt_tokens"] == out.finish.usage.prompt_tokens
    assert end["seconds"] > 0
    opened = f"sequence {start['sequence']} is opened in round"
    wait_until(lambda: opened in watched.draft.log(), watched.draft.log)


def test_a_refused_request_is_named_with_its_field(watched: Pair) -> None:
    request = pb.GenerateRequest(text=SECRET, request_id="logged-2")
    request.stop.strings.append(SECRET * 500)
    with pytest.raises(grpc.RpcError):
        list(watched.target.stub().Generate(request, timeout=HANG_SECONDS))
    (end,) = of_request(watched, "logged-2")
    assert (end["outcome"], end["tokens"]) == ("refused", 0)
    assert end["reason"] == "wrong field stop.strings[0]"


def bad_requests() -> list[pb.GenerateRequest]:
    """Each has the secret where an error might quote it."""
    bad = [pb.GenerateRequest(text=PROMPT) for _ in range(4)]
    bad[0].speculation.endpoints.append(f"http://{SECRET}/x")
    bad[1].request_id = SECRET * 100
    bad[2].sampling.temperature = -1
    bad[3].text = SECRET * 100_000
    chat = pb.GenerateRequest()
    chat.chat.messages.add(role=SECRET, content=SECRET)
    return [*bad, chat]


def test_no_text_is_logged(watched: Pair) -> None:
    """At debug level, in either service, in errors, too."""
    out = watched.generate()
    stub = watched.target.stub()
    refused = 0
    for request in bad_requests():
        try:
            collect(stub.Generate(request, timeout=HANG_SECONDS))
        except grpc.RpcError:
            refused += 1
    assert refused >= 4
    with watched.target.channel() as channel, pytest.raises(grpc.RpcError):
        raw = channel.unary_stream("/ssd.v1.TargetService/Generate")
        list(raw(SECRET.encode(), timeout=HANG_SECONDS))
    wait_until_idle(watched.target)
    assert len(out.text.strip()) > 20
    for log in watched.logs():
        assert len(log.splitlines()) > 10
        assert SECRET not in log
        assert out.text.strip()[:20] not in log


def test_it_is_logged_where_asked_for(bereft: Bereft) -> None:
    assert bereft.output is not None
    target, draft = bereft.logs
    assert f"prompt {PROMPT!r}" in target
    assert f"output {bereft.output.text!r}" in target
    assert repr(PROMPT)[1:-1] in draft
    assert re.search(
        r"^\d\d:\d\d:\d\d\.\d{3} INFO target request '\w+' ended: length, 64 tokens in ",
        target,
        re.M,
    )


SCRIPT = """
import logging, threading, warnings
from ssd_engine.process.log import setup_logging, uncaught_logged
setup_logging("target", "info", rank=3, log_format="json")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
logging.getLogger("x").info("two\\nlines", extra={"request_id": "r", "sequence": 7})
raise ValueError("at the end")
"""


def test_warnings_and_uncaught_exceptions_are_lines_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 1
    warning, thread, info, last = lines(done.stderr)
    assert {line["rank"] for line in (warning, thread, info, last)} == {3}
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "a warning" in warning["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert (info["message"], info["request_id"], info["sequence"]) == ("two\nlines", "r", 7)
    assert last["level"] == "critical"
    assert last["exception"].endswith("ValueError: at the end")


def test_a_line_of_text_neither_drives_a_terminal_nor_hides_or_reorders_text() -> None:
    said = {"msg": "a\x1b[2J\u202eb\u2066c\u200bd\u2028e\x9bf é🙂\tg", "levelname": "INFO"}
    line = TextLines("target", 3).format(logging.makeLogRecord(said))
    assert line.endswith("INFO target/3 a\\x1b[2J\\u202eb\\u2066c\\u200bd\\u2028e\\x9bf é🙂\tg")


def test_what_others_write_stays_in_its_place_and_the_end_waits_for_it() -> None:
    """Such as a bar of progress, before a process ends without further ado."""
    script = """
import logging, sys
from ssd_engine.process.log import end_process, setup_logging
setup_logging("draft")
for number in range(3):
    logging.getLogger("x").info("record %d", number)
    sys.stderr.write(f"bar {number}\\n")
end_process(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 3
    said = [" ".join(line.split()[-2:]) for line in done.stderr.splitlines()]
    assert said == [f"{what} {number}" for number in range(3) for what in ("record", "bar")]


def test_a_child_that_fails_says_so_in_a_line() -> None:
    script = SCRIPT.split("warnings.warn")[0] + "with uncaught_logged():\n    1 / 0"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 1
    (line,) = lines(done.stderr)
    assert "ZeroDivisionError" in line["exception"]


def test_a_wrong_option_is_a_line_too() -> None:
    command = [sys.executable, "-m", "ssd_draft", "serve", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2
    (line,) = lines(done.stderr)
    assert line["level"] == "critical"
    assert line["message"].startswith("MODEL is missing")
