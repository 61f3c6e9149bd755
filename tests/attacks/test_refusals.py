"""Who is refused has a line in the log, and is counted; whoever is refused without end, a few."""

import re

import pytest

from ssd.v1 import target_pb2 as pb
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, bearer, request
from tests.waiting import wait_until
from tests.wire.raw import RawConnection, RawStream, framed, headers

GENERATE = "/ssd.v1.TargetService/Generate"
CLOCK = "/ssd.v1.TraceService/GetClock"
CHECK = "/grpc.health.v1.Health/Check"
MANY = 300
CROWD = 65  # one more than there is room for
EXHAUSTED = 8
SECRET = "Brumblewick"


WRONG = pb.GenerateRequest(text=SECRET, stop={"strings": [SECRET * 500]})
# What is sent, and from where: addresses of their own are kinds of their own.
Case = tuple[str, str, pb.GenerateRequest, int, str]
NOTHING = pb.GenerateRequest()
CASES: dict[str, Case] = {
    "127.0.7.1": (GENERATE, "", NOTHING, 16, "UNAUTHENTICATED: a token is needed"),
    "127.0.7.2": (GENERATE, "nobody", NOTHING, 16, "UNAUTHENTICATED: the token is not known here"),
    "127.0.7.3": (
        *(CLOCK, OTHER, NOTHING, 7),
        "PERMISSION_DENIED: the token of 'other' has not the role admin",
    ),
    "127.0.7.4": (GENERATE, OTHER, WRONG, 3, r"INVALID_ARGUMENT: wrong field stop.strings\[0\]"),
    "127.0.7.5": (
        *(GENERATE, ATTACKER, request("word " * 200), 3),
        "INVALID_ARGUMENT: wrong field prompt",
    ),
    "127.0.7.6": (
        *("/x/y\nforged \x1b[31m" + "z" * 1000, OTHER, NOTHING, 12),
        "UNIMPLEMENTED: there is no such method here",
    ),
}
KNOWN = {OTHER: r" \('other'\)", ATTACKER: r" \('attacker'\)"}


def call(client: RawConnection, path: str, token: str, message: pb.GenerateRequest) -> RawStream:
    shown = headers(path, bearer(token) if token else [])
    return client.until_ended(client.call(shown, framed(message.SerializeToString())))


def lines_of(attacked: Attacked, source: str) -> list[str]:
    log = attacked.target.log().splitlines()
    return [line for line in log if f" WARNING target refused {source}:" in line]


@pytest.mark.parametrize("source", CASES)
def test_there_is_a_line_with_peer_identity_method_and_reason(
    attacked: Attacked, source: str
) -> None:
    path, token, message, code, words = CASES[source]
    with RawConnection(attacked.target.address, source=source) as client:
        assert call(client, path, token, message).status[0] == code
    (line,) = wait_until(lambda: lines_of(attacked, source), attacked.target.log)
    method = re.escape(path if path in (GENERATE, CLOCK) else r"/x/y\nforged \x1b[31mzzz")
    who = KNOWN.get(token, "")
    assert re.search(rf"refused [\d.]+:\d+{who}: {method}\S*: {words}", line), line
    assert len(line) < 400
    assert SECRET not in attacked.target.log()


def test_calls_without_end_are_counted_and_have_few_lines(attacked: Attacked) -> None:
    name = 'ssd_refusals_total{method="Generate",reason="unauthenticated"}'
    before = attacked.target.metrics()[name]
    with RawConnection(attacked.target.address, source="127.0.7.9") as client:
        for _ in range(MANY):
            call(client, GENERATE, "", NOTHING)
    wait_until(lambda: attacked.target.metrics()[name] >= before + MANY)
    assert attacked.target.metrics()[name] == before + MANY
    assert 1 <= len(lines_of(attacked, "127.0.7.9")) < MANY / 10


def test_who_is_given_up_for_others_has_a_line(attacked: Attacked) -> None:
    """On a port for calls: of health checks that say nothing, the oldest goes."""
    with RawConnection(attacked.target.address, source="127.0.7.10") as client:
        calls = [client.call(headers(CHECK), b"", end=False) for _ in range(CROWD)]
        assert client.until_ended(calls[0]).status[0] == EXHAUSTED
        assert not any(each.ended for each in calls[1:])
    (line,) = wait_until(lambda: lines_of(attacked, "127.0.7.10"), attacked.target.log)
    assert f"{CHECK}: RESOURCE_EXHAUSTED: 64 calls have not sent their request" in line


def test_who_is_served_has_none(attacked: Attacked) -> None:
    with RawConnection(attacked.target.address, source="127.0.7.11") as client:
        stream = call(client, GENERATE, OTHER, request(tokens=3))
    assert stream.status[0] == 0
    assert pb.GenerateResponse.FromString(stream.messages()[-1]).HasField("finish")
    assert not lines_of(attacked, "127.0.7.11")
