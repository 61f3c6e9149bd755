"""`make faults` finds what a fault has cost, and fails for what nobody was told."""

import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools.faults.cases import FAULTS, cases, name_of
from tools.faults.fleet import PLACES
from tools.faults.streams import Heard, Stream, Verdict, judge, longest_gap
from tools.faults.table import HEAD, Row, table, write

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 2400
WHOLE = Heard("a lamb slept", [1, 2, 3], [("a", -0.5)], "length", done=True)
BEGUN = Heard("a lamb", [1, 2], [("a", -0.5)])


@pytest.mark.parametrize(
    ("heard", "verdict"),
    [
        (WHOLE, Verdict.EQUAL),
        (replace(WHOLE, text="a lamb wept"), Verdict.LOST),
        (replace(WHOLE, token_ids=[1, 2, 4]), Verdict.LOST),
        (replace(WHOLE, logprobs=[("a", -0.6)]), Verdict.LOST),
        (replace(WHOLE, done=False), Verdict.LOST),
        (replace(BEGUN, finish="length", done=True), Verdict.LOST),
        (replace(BEGUN, done=True), Verdict.LOST),
        (BEGUN, Verdict.LOST),
        (replace(BEGUN, error="it leaves", done=True), Verdict.ERROR),
        (replace(BEGUN, cut="reset"), Verdict.CUT),
        (replace(BEGUN, text="a limb", error="it leaves"), Verdict.LOST),
        (replace(BEGUN, token_ids=[1, 5], cut="reset"), Verdict.LOST),
    ],
)
def test_whatever_looks_like_an_answer_must_be_the_whole_one(
    heard: Heard, verdict: Verdict
) -> None:
    assert judge(heard, WHOLE) is verdict


CHOICE = b'{"text": "a", "token_ids": [1], "logprobs": null, "finish_reason": null}'
CHUNK = b'data: {"choices": [%b]}' % CHOICE
ERROR = b'data: {"error": {"message": "it leaves"}}'
END = b"0\r\n\r\n"
HEADERS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*lines: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\n\n\r\n" % (len(line) + 2, line) for line in lines)


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (
            HEADERS + chunked(CHUNK, b": ping", CHUNK, b"data: [DONE]") + END,
            Heard("aa", [1, 1], done=True),
        ),
        (HEADERS + chunked(CHUNK) + END, Heard("a", [1])),
        (HEADERS + chunked(CHUNK, ERROR) + END, Heard("a", [1], error="it leaves")),
        (HEADERS + chunked(CHUNK), Heard("a", [1], cut="RemoteProtocolError")),
        (
            b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",
            Heard(error="503: busy"),
        ),
    ],
)
def test_a_body_that_was_cut_is_told_from_one_that_ends(answer: bytes, heard: Heard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_once, args=(server, answer), daemon=True).start()
        stream = Stream(f"127.0.0.1:{server.getsockname()[1]}", {})
        stream.start()
        stream.join()
    if stream.heard.cut is not None:
        stream.heard.cut = stream.heard.cut.partition(":")[0]
    assert stream.heard == heard


def _answer_once(server: socket.socket, answer: bytes) -> None:
    caller, _ = server.accept()
    with caller:
        caller.recv(1 << 16)
        caller.sendall(answer)
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(1 << 16):  # what is not read would reset the connection
            pass


def test_a_gap_that_was_over_before_the_fault_is_none_of_it() -> None:
    assert longest_gap([0.0, 5.0, 6.0, 8.0, 9.0], since=5.5) == 2.0
    assert longest_gap([0.0, 5.0, 6.0], since=4.0) == 5.0
    assert longest_gap([], since=0.0) == 0.0


LOST, CUT = Counter({Verdict.EQUAL: 7, Verdict.LOST: 1}), Counter({Verdict.CUT: 8})


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        (Row("kill", "target front", Counter({Verdict.EQUAL: 8}), 2.0, 5.0, most_gap=12.0), []),
        (Row("kill", "target front", LOST, 2.0, 5.0), ["kill target front: 1 streams: lost"]),
        (Row("kill", "draft front", CUT, 2.0, 5.0), ["kill draft front: 8 streams: cut off"]),
        (Row("kill", "gateway", CUT, 2.0, 5.0, also_fit=frozenset({Verdict.CUT})), []),
        (
            Row("stop", "target engine", Counter({Verdict.EQUAL: 8}), 60.0, 5.0, most_gap=12.0),
            ["stop target engine: a stream stood still for 60.0 s"],
        ),
    ],
)
def test_what_nobody_should_have_to_bear_is_named(row: Row, problems: list[str]) -> None:
    assert row.problems == problems


def test_the_table_of_a_page_is_replaced_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    old, new = (Row("kill", "gateway", CUT, gap, 1.0) for gap in (0.1, 2.5))
    for before in (table([old, old]), HEAD):
        page.write_text(f"| a | b |\n|---|---|\n\n{before}\n\n| c |\n")
        write(page, [new])
        assert page.read_text() == f"| a | b |\n|---|---|\n\n{table([new])}\n\n| c |\n"
    assert str(new) == "| kill | gateway | 0 | 0 | 8 | 0 | 2.5 | 1.0 |"


def test_the_docs_have_every_case_and_none_of_them_lost_a_text() -> None:
    after = (ROOT / "docs/testing.md").read_text().partition(HEAD)[2].strip().split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in after.splitlines()]
    every = cases(list(FAULTS), [name_of(place) for place in PLACES])
    assert [(fault, process) for fault, process, *_ in rows] == [
        (fault, str(place)) for fault, place in every
    ]
    assert {lost for *_, lost, _, _ in rows} == {"0"}


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 30)
def test_nothing_is_lost_without_an_error() -> None:
    """How long a stream stands still depends on the machine: it is printed, and not asserted."""
    command = [sys.executable, "-m", "tools.faults", "--most-gap", "inf"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was lost without an error" in ended.stdout
