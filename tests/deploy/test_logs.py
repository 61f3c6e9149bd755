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
from tests.processes import wait_until_idle
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

SECRET = "Brumblewick"
LEVELS = {"debug", "info", "warning", "error", "critical"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def of_request(pair: Pair, request_id: str) -> list[dict[str, Any]]:
    """To its end, whose line may come a moment after the client has heard of it."""

    def found() -> list[dict[str, Any]] | None:
        whole = pair.target.log().rpartition("\n")[0]  # the last line may be half written
        own = [line for line in lines(whole) if line.get("request_id") == request_id]
        return own if own and "outcome" in own[-1] else None

    seen = wait_until(found, pair.target.log)
    assert seen is not None
    return seen


def run(*command: str) -> tuple[int, list[str]]:
    """A Python of its own: its exit code, and what it writes to stderr."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    return done.returncode, done.stderr.splitlines()


def test_every_line_of_every_process_is_an_object(watched: Pair) -> None:
    watched.generate()
    with pytest.raises(grpc.RpcError):
        watched.generate("Once " * 3000)  # of which the tokenizer has something to say, too
    for role, log in zip(("target", "draft"), watched.logs(), strict=True):
        found = lines(log)
        assert all(TIME.fullmatch(line["time"]) and line["logger"] for line in found)
        assert {line["level"] for line in found} <= LEVELS
        assert {(line["role"], type(line["message"])) for line in found} == {(role, str)}
        ranks = {None, 0, 1} if role == "target" and FULL else {None, 0}
        assert {line.get("rank") for line in found} == ranks
        assert any("link" in line for line in found)


def test_a_request_has_a_start_and_an_end(watched: Pair) -> None:
    out = watched.generate(request_id="logged-1")
    start, end = of_request(watched, "logged-1")
    number, prompt = start["sequence"], out.finish.usage.prompt_tokens
    assert (start["level"], end["level"], end["seconds"] > 0) == ("debug", "info", True)
    expected = {"sequence": number, "outcome": "length", "tokens": 64, "prompt_tokens": prompt}
    assert expected.items() <= end.items()
    opened = f"sequence {number} is opened in round"
    wait_until(lambda: opened in watched.draft.log(), watched.draft.log)


def test_a_refused_request_is_named_with_its_field(watched: Pair) -> None:
    request = pb.GenerateRequest(text=SECRET, request_id="logged-2")
    request.stop.strings.append(SECRET * 500)
    with pytest.raises(grpc.RpcError):
        list(watched.target.stub().Generate(request, timeout=HANG_SECONDS))
    (end,) = of_request(watched, "logged-2")
    said = {"outcome": "refused", "tokens": 0, "reason": "wrong field stop.strings[0]"}
    assert said.items() <= end.items()


# Each has the secret where an error might quote it.
BAD = [
    pb.GenerateRequest(text=PROMPT, speculation={"endpoints": [f"http://{SECRET}/x"]}),
    pb.GenerateRequest(text=PROMPT, request_id=SECRET * 100),
    pb.GenerateRequest(text=PROMPT, sampling={"temperature": -1}, cache_salt=SECRET),
    pb.GenerateRequest(text=SECRET * 100_000),
    pb.GenerateRequest(chat={"messages": [{"role": SECRET, "content": SECRET}]}),
]


def test_no_text_is_logged(watched: Pair) -> None:
    """At debug level, in either service, in errors, too."""
    out = watched.generate()
    refused = 0
    with watched.target.channel() as channel:
        call = channel.unary_stream("/ssd.v1.TargetService/Generate")
        for request in (*(each.SerializeToString() for each in BAD), SECRET.encode()):
            try:
                list(call(request, timeout=HANG_SECONDS))
            except grpc.RpcError:
                refused += 1
    assert refused >= len(BAD)
    wait_until_idle(watched.target)
    text = out.text.strip()
    assert len(text) > 20
    for log in watched.logs():
        assert len(log.splitlines()) > 10
        assert SECRET not in log
        assert text[:20] not in log


def test_it_is_logged_where_asked_for(bereft: Bereft) -> None:
    target, draft = bereft.logs
    assert f"prompt {PROMPT!r}" in target
    assert f"output {bereft.output.text!r}" in target
    assert repr(PROMPT)[1:-1] in draft
    ended = r"^\d\d:\d\d:\d\d\.\d{3} INFO target request '\w+' ended: length, 64 tokens in "
    assert re.search(ended, target, re.MULTILINE)


SCRIPT = """
import logging, threading, warnings
from ssd_engine.process.log import setup_logging, uncaught_logged
setup_logging("target", "info", rank=3, log_format="json")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
logging.getLogger("x").info("two\\nlines", extra=dict(request_id="r", sequence=7))
{around}:
    raise ValueError("at the end")
"""


@pytest.mark.parametrize("around", ["if True", "with uncaught_logged()"])
def test_warnings_and_uncaught_exceptions_are_lines_too(around: str) -> None:
    """Those of a child, too."""
    code, said = run("-c", SCRIPT.format(around=around))
    warning, thread, info, last = map(json.loads, said)
    assert code == 1
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


BESIDE = """
import logging, sys
from ssd_engine.process.log import end_process, setup_logging
setup_logging("draft")
for number in range(3):
    logging.getLogger("x").info("record %d", number)
    sys.stderr.write(f"bar {number}\\n")
end_process(3)
"""


def test_what_others_write_stays_in_its_place_and_the_end_waits_for_it() -> None:
    """Such as a bar of progress, before a process ends without further ado."""
    code, said = run("-c", BESIDE)
    expected = [f"{what} {number}" for number in range(3) for what in ("record", "bar")]
    assert (code, [" ".join(line.split()[-2:]) for line in said]) == (3, expected)


def test_a_wrong_option_is_a_line_too() -> None:
    code, (line,) = run("-m", "ssd_draft", "serve", "--log-format", "json")
    assert (code, json.loads(line)["level"]) == (2, "critical")
    assert json.loads(line)["message"].startswith("MODEL is missing")
