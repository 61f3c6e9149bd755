"""Whatever a stranger sends, the gateway answers with a clear status, and goes on."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.gateway.callers import connect, in_flight, post
from tests.processes import GatewayProcess as Gateway
from tests.processes import TracedPair, gateway
from tests.suite.scale import share
from tests.waiting import wait_until

ASK = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
SILENT_SECONDS = 0.05  # after which a second answer is not expected
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(traced_pair: TracedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that does not wait long for the rest of a request."""
    folder = tmp_path_factory.mktemp("hasty")
    with gateway(folder, "--read-timeout", "1", targets=[traced_pair[0].address]) as process:
        yield process


def exchange(gateway: Gateway, *pieces: bytes) -> bytes:
    """What comes back until the connection ends, or has answered and falls silent."""
    answer = b""
    with connect(gateway) as connection, suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
        while data := connection.recv(65536):
            answer += data
            if is_whole(answer):
                connection.settimeout(SILENT_SECONDS)
                with suppress(TimeoutError):
                    answer += connection.recv(65536)
                break
    return answer


def is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    told = re.search(rb"content-length: (\d+)", head)
    return bool(found) and (b"0\r\n\r\n" in body if told is None else len(body) >= int(told[1]))


def statuses(answer: bytes) -> list[int]:
    lines = answer.split(b"\r\n")
    return [int(line.split(b" ")[1]) for line in lines if line.startswith(b"HTTP/1.1 ")]


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


CLOSING = b"connection: close\r\n"
GOOD = {
    "a length": post("/v1/completions", ASK, "connection: close\r\n"),
    "chunks": HEAD + CLOSING + b"transfer-encoding: chunked\r\n\r\n" + chunked(ASK),
}
SECOND = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
SMUGGLED = {
    "a length and chunks": HEAD
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"
    + SECOND,
    "chunks and a length": HEAD
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    + SECOND,
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 60\r\n\r\n{}" + SECOND,
    "a list of lengths": HEAD + b"content-length: 3, 60\r\n\r\n{}" + SECOND,
    "a length with a sign": HEAD + b"content-length: +3\r\n\r\n{}" + SECOND,
    "a length in hexadecimal": HEAD + b"content-length: 0x3\r\n\r\n{}" + SECOND,
    "a negative length": HEAD + b"content-length: -1\r\n\r\n" + SECOND,
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + chunked(ASK),
    "a coding twice": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + chunked(ASK),
    "a coding after a blank": HEAD + b"transfer-encoding : chunked\r\n\r\n" + chunked(ASK),
    "a folded header": HEAD + b"x-one: a\r\n content-length: 60\r\n\r\n",
    "a bare carriage return": HEAD + b"x-one: a\rcontent-length: 60\r\n\r\n",
    "a zero in a name": HEAD + b"x\x00y: a\r\n\r\n",
    "a chunk of no size": HEAD + b"transfer-encoding: chunked\r\n\r\n\r\n" + SECOND,
    "a chunk of a wrong size": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + SECOND,
    "a chunk of 2**64 bytes": HEAD + b"transfer-encoding: chunked\r\n\r\n1" + b"0" * 16 + b"\r\n{}",
    "no protocol": b"POST /v1/completions\r\n\r\n",
    "another protocol": b"GET / HTTP/9.9\r\n\r\n",
    "HTTP/2 without a word": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
}
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
TRAILER = b"x-one: abcdefghijklmnop\r\n"
TOO_LARGE = {
    "a length beyond the bound": (HEAD + b"content-length: 99999999999\r\n\r\n{}", {413}),
    "headers without end": (HEAD + b"x-one: " + b"a" * (1 << 20), {431}),
    "a thousand headers": (HEAD + b"x-one: abcdefghijklmnop\r\n" * 4000 + b"\r\n", {431}),
    "a path without end": (b"GET /" + b"a" * (1 << 20), {400, 431}),
    "trailers without end": (HEAD + CHUNKED + b"2\r\n{}\r\n0\r\n" + TRAILER * 9000, {431}),
    "a trailer without end": (HEAD + CHUNKED + b"0\r\nx-one: " + b"a" * (1 << 20), {431}),
    "a chunk's extension without end": (HEAD + CHUNKED + b"2;" + b"a" * (1 << 20), {400, 431}),
}
UNWANTED = {
    "a body beyond the bound": (HEAD + b"content-length: 99999999999\r\n\r\n", 413),
    "a body of another type": (
        HEAD.replace(b"/json", b"/xml") + b"content-length: 9999999\r\n\r\n",
        415,
    ),
    "a body of no use": (
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999\r\n\r\n",
        200,
    ),
    "trailers of no use": (
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + CHUNKED + b"0\r\n" + TRAILER,
        200,
    ),
}


@pytest.mark.parametrize("how", GOOD)
def test_a_body_comes_with(hasty: Gateway, how: str) -> None:
    assert statuses(exchange(hasty, GOOD[how])) == [200]


@pytest.mark.parametrize("what", SMUGGLED)
def test_nothing_is_smuggled_by(hasty: Gateway, what: str) -> None:
    """One refusal, and nothing that follows is read as a request."""
    answer = exchange(hasty, SMUGGLED[what])
    assert all(400 <= status < 500 for status in statuses(answer)), answer
    assert len(statuses(answer)) <= 1
    assert b"version" not in answer


@pytest.mark.parametrize("what", TOO_LARGE)
def test_too_large_is(hasty: Gateway, what: str) -> None:
    sent, expected = TOO_LARGE[what]
    assert set(statuses(exchange(hasty, sent))) <= expected


@pytest.mark.parametrize("what", UNWANTED)
def test_the_connection_ends_after_the_answer_to(hasty: Gateway, what: str) -> None:
    """However much of it there still is: nobody reads it, and nobody keeps it."""
    sent, status = UNWANTED[what]
    with connect(hasty) as connection:
        connection.sendall(sent)
        answer = connection.recv(65536)
        assert statuses(answer) == [status]
        assert b"connection: close" in answer
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(bytes(1 << 20))


def test_a_body_that_does_not_come_ends_the_connection(hasty: Gateway) -> None:
    answer = exchange(hasty, HEAD + b"content-length: 60\r\n\r\n{")
    assert statuses(answer) == [408]
    assert b"connection: close" in answer


def test_a_body_that_grows_beyond_the_bound_is_refused(hasty: Gateway) -> None:
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    pieces = [HEAD + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 17, b"0\r\n\r\n"]
    assert statuses(exchange(hasty, *pieces)) in ([413], [])


def test_pages_of_strangers_cannot_call_it(hasty: Gateway) -> None:
    foreign = GOOD["a length"].replace(b"127.0.0.1", b"evil.example")
    assert statuses(exchange(hasty, foreign)) == [403]


class Mutations:
    """Bodies, headers and chunks that are wrong in some way, from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fields = [
            *("prompt", "max_tokens", "n", "seed", "stop", "logit_bias", "stream", "echo"),
            *("temperature", "top_p", "top_k", "logprobs", "speculation", "stream_options"),
            *("model", "min_tokens", "stop_token_ids", "user", "metadata", "cache_salt", "zzz"),
        ]
        self._values: list[object] = [
            *(None, True, 0, -1, 2**63, 2**64, 1e308, -1e-320, "", "\x00", "\ud800", "x" * 5000),
            *([], {}, [[]], [{}], {"a": {"b": []}}, [1, "a"], {"mode": 3}, [2**40], "NaN"),
        ]
        self._headers = [
            *(b"authorization: Bearer \xe9", b"authorization: \xff\x01", b"authorization:"),
            *(b"authorization: Bearer a\tkey", b"traceparent: \xe9", b"traceparent:"),
            b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-\xb9",
            *(b"x-request-id: \xe9\x80", b"x-request-id: " + b"a" * 999, b"x-request-id: \x7f"),
        ]

    def body(self) -> bytes:
        rng = self._rng
        content = {"prompt": "Once", "max_tokens": 1}
        for _ in range(rng.randint(1, 3)):
            content[rng.choice(self._fields)] = rng.choice(self._values)  # type: ignore[assignment]
        data = bytearray(json.dumps(content).encode())
        for _ in range(rng.choice((0, 0, 0, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.1 else data)

    def request(self) -> bytes:
        rng, body = self._rng, self.body()
        framed = chunked(body) if rng.random() < 0.3 else body
        coding = b"transfer-encoding: chunked\r\n" if framed != body else b""
        coding = coding or b"content-length: %d\r\n" % len(body)
        odd = rng.choice(self._headers) + b"\r\n" if rng.random() < 0.3 else b""
        data = bytearray(HEAD + CLOSING + odd + coding + b"\r\n" + framed)
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)


@pytest.fixture
def unharmed(hasty: Gateway, traced_pair: TracedPair) -> Iterator[None]:
    """After the test, nothing runs, and a good request is served as ever."""
    before = exchange(hasty, GOOD["a length"])
    yield
    assert statuses(exchange(hasty, GOOD["a length"])) == statuses(before) == [200]
    wait_until(lambda: in_flight(traced_pair[0]) == 0, hasty.log)
    assert "Traceback" not in hasty.log()


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("part", range(4))
def test_malformed_requests_are_refused(hasty: Gateway, part: int) -> None:
    """10,000 of them in full: no 500, no hang."""
    mutations = Mutations(part)
    for _ in range(share(2500)):
        sent = mutations.request()
        found = statuses(exchange(hasty, sent))
        assert all(status == 200 or 400 <= status < 500 for status in found), (sent, found)
