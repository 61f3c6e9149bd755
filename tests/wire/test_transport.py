"""Calls that break gRPC's rules below its messages: headers, prefixes, compression, timeouts.

Some of them the library answers by itself, before any code of ours; these are named here.
"""

import gzip

import pytest

from ssd.v1 import target_pb2 as pb
from tests.processes import wait_until_idle
from tests.speculation.generations import Pair
from tests.waiting import wait_until
from tests.wire.raw import RawConnection, framed, headers

INFO = "/ssd.v1.TargetService/GetModelInfo"
GENERATE = "/ssd.v1.TargetService/Generate"
OK, INVALID, DEADLINE, EXHAUSTED, UNIMPLEMENTED, LIBRARY = 0, 3, 4, 8, 12, 13
RESET = -1
EMPTY = framed(b"")
STORY = pb.GenerateRequest(text="Once upon", stop=pb.StopOptions(max_tokens=3))
LONG_STORY = pb.GenerateRequest(text="Once upon", stop=pb.StopOptions(max_tokens=1000))

# What is sent: headers that differ, one that is missing, bytes; and the status.
Case = tuple[list[tuple[str, str]], str, bytes, int]
CASES: dict[str, Case] = {
    "nothing wrong": ([], "", EMPTY, OK),
    "an unknown flag": ([], "", framed(b"", 2), OK),
    "no message": ([], "", b"", INVALID),
    "half a prefix": ([], "", b"\0\0", INVALID),
    "compressed with nothing": ([], "", framed(b"abc", 1), INVALID),
    "a length beyond the end": ([], "", framed(b"abc", length=200), INVALID),
    "a length before the end": ([], "", framed(b"abc", length=2), INVALID),
    "a length beyond all bounds": ([], "", framed(b"abc", length=2**32 - 1), EXHAUSTED),
    "compressed": (
        [("grpc-encoding", "gzip")],
        "",
        framed(gzip.compress(b""), 1),
        UNIMPLEMENTED,
    ),
    "a bomb": (
        [("grpc-encoding", "gzip")],
        "",
        framed(gzip.compress(b"\n" * 30_000_000), 1),
        UNIMPLEMENTED,
    ),
    "compressed garbage": ([("grpc-encoding", "deflate")], "", framed(b"abcd", 1), UNIMPLEMENTED),
    "a time of nothing": (
        [("grpc-timeout", "0n"), (":path", GENERATE)],
        "",
        framed(LONG_STORY.SerializeToString()),
        DEADLINE,
    ),
    "a time without end": ([("grpc-timeout", "9" * 40 + "H")], "", EMPTY, OK),
    "another content type": ([("content-type", "application/json")], "", EMPTY, OK),
    "no content type": ([], "content-type", EMPTY, OK),
    "a status from a client": ([("grpc-status", "13"), (":status", "200")], "", EMPTY, OK),
    "control characters": ([("x-a", "a\x01\n")], "", EMPTY, OK),
    "many headers": ([(f"x-{i}", "b") for i in range(200)], "", EMPTY, OK),
    "no such method": ([(":path", "/ssd.v1.TargetService/Nope")], "", EMPTY, UNIMPLEMENTED),
    "no such service": ([(":path", "/a/b/../%00")], "", EMPTY, UNIMPLEMENTED),
    "an empty path": ([(":path", "")], "", EMPTY, UNIMPLEMENTED),
    "two paths": ([(":path", INFO), (":path", "/x/y")], "", EMPTY, UNIMPLEMENTED),
    # Answered by the library, with INTERNAL, before our code:
    "an unknown encoding": ([("grpc-encoding", "zstd9")], "", EMPTY, LIBRARY),
    "no time": ([("grpc-timeout", "")], "", EMPTY, LIBRARY),
    "a time in words": ([("grpc-timeout", "banana")], "", EMPTY, LIBRARY),
    "a negative time": ([("grpc-timeout", "-1S")], "", EMPTY, LIBRARY),
    "another scheme": ([(":scheme", "ftp")], "", EMPTY, LIBRARY),
    "a key in capitals": ([("X-Upper", "a")], "", EMPTY, LIBRARY),
    "a key of two words": ([("x y", "a")], "", EMPTY, LIBRARY),
    "bytes that are no base64": ([("x-bin", "***")], "", EMPTY, LIBRARY),
    # Or reset, without a status:
    "GET": ([(":method", "GET")], "", EMPTY, RESET),
    "no path": ([], ":path", EMPTY, RESET),
    "no scheme": ([], ":scheme", EMPTY, RESET),
    "no authority": ([], ":authority", EMPTY, RESET),
    "no trailers": ([], "te", EMPTY, RESET),
}
LIBRARYS_WORDS = ("Compression bit", "Error parsing", "Illegal header key")


def test_calls_that_break_the_rules_are_answered_one_by_one(victims: Pair) -> None:
    found = {}
    for name, (changes, without, data, expected) in CASES.items():
        with RawConnection(victims.target.address) as client:
            stream = client.until_ended(client.call(headers(INFO, changes, without), data))
        code, text = stream.status
        if (code == LIBRARY and not text.startswith(LIBRARYS_WORDS)) or code != expected:
            found[name] = (code, text, expected)
    assert not found


def test_calls_that_break_off_in_the_middle_leave_nothing(victims: Pair) -> None:
    request = framed(STORY.SerializeToString())
    before = victims.target.metrics()["ssd_prompt_tokens_total"]
    with RawConnection(victims.target.address) as client:
        for cut in range(0, len(request), 3):
            client.reset(client.call(headers(GENERATE), request[:cut], end=False))
        for _ in range(20):
            client.reset(client.call(headers(GENERATE), request))
        whole = client.until_ended(client.call(headers(GENERATE), request))
        half = client.call(headers(GENERATE), request[:4], end=False)
    assert whole.status[0] == OK
    assert pb.GenerateResponse.FromString(whole.messages()[-1]).WhichOneof("event") == "finish"
    assert not half.ended
    wait_until_idle(victims.target)
    wait_until(lambda: victims.target.metrics()["ssd_prompt_tokens_total"] > before)
    assert "Traceback" not in victims.target.log()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" * 9000]
)
def test_what_is_no_http2_is_left(victims: Pair, data: bytes) -> None:
    with RawConnection(victims.target.address) as client:
        client._socket.sendall(data)
        wait_until(lambda: client.listen(0.1) or client.gone)
    wait_until_idle(victims.target)
