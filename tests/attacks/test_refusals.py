"""Who is refused has a line in the log, and is counted; whoever is refused without end, a few."""

import re

import pytest

from ssd.v1 import target_pb2 as pb
from tests.attacks.conftest import ATTACKER, OTHER, Attacked, request
from tests.waiting import wait_until
from tests.wire.raw import RawConnection, RawStream, framed, headers

GENERATE = "/ssd.v1.TargetService/Generate"
CLOCK = "/ssd.v1.TraceService/GetClock"
CHECK = "/grpc.health.v1.Health/Check"
MANY = 300
CROWD = 65  # one more than there is room for
INVALID, EXHAUSTED, DENIED, UNIMPLEMENTED, UNAUTHENTICATED = 3, 8, 7, 12, 16
SECRET = "Brumblewick"


def wrong() -> bytes:
    """Its text is quoted in no log."""
    message = request(SECRET)
    message.stop.strings.append(SECRET * 500)
    return framed(message.SerializeToString())


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


# What is sent, and from where: addresses of their own are kinds of their own.
Case = tuple[str, list[tuple[str, str]], bytes, int, str]
CASES: dict[str, Case] = {
    "127.0.7.1": (GENERATE, [], framed(b""), UNAUTHENTICATED, "UNAUTHENTICATED: a token is needed"),
    "127.0.7.2": (
        GENERATE,
        bearer("a-token-of-nobody"),
        framed(b""),
        UNAUTHENTICATED,
        "UNAUTHENTICATED: the token is not known here",
    ),
    "127.0.7.3": (
        CLOCK,
        bearer(OTHER),
        framed(b""),
        DENIED,
        "PERMISSION_DENIED: the token of 'other' has not the role admin",
    ),
    "127.0.7.4": (
        GENERATE,
        bearer(OTHER),
        wrong(),
        INVALID,
        r"INVALID_ARGUMENT: wrong field stop.strings\[0\]",
    ),
    "127.0.7.5": (
        GENERATE,
        bearer(ATTACKER),
        framed(request("word " * 200).SerializeToString()),
        INVALID,
        "INVALID_ARGUMENT: wrong field prompt",
    ),
    "127.0.7.6": (
        "/x/y\nforged \x1b[31m" + "z" * 1000,
        bearer(OTHER),
        framed(b""),
        UNIMPLEMENTED,
        "UNIMPLEMENTED: there is no such method here",
    ),
}
KNOWN = {OTHER: r" \('other'\)", ATTACKER: r" \('attacker'\)"}


def call(attacked: Attacked, source: str, case: Case) -> RawStream:
    path, shown, data, *_ = case
    with RawConnection(attacked.target.address, source=source) as client:
        return client.until_ended(client.call(headers(path, shown), data))


def lines_of(attacked: Attacked, source: str) -> list[str]:
    log = attacked.target.log().splitlines()
    return [line for line in log if f" WARNING target refused {source}:" in line]


def expected(case: Case) -> str:
    path, shown, _, _, words = case
    who = next((name for token, name in KNOWN.items() if shown == bearer(token)), "")
    method = re.escape(path if path in (GENERATE, CLOCK) else r"/x/y\nforged \x1b[31mzzz")
    return rf"refused [\d.]+:\d+{who}: {method}\S*: {words}"


@pytest.mark.parametrize("source", CASES)
def test_there_is_a_line_with_peer_identity_method_and_reason(
    attacked: Attacked, source: str
) -> None:
    case = CASES[source]
    code, _ = call(attacked, source, case).status
    assert code == case[3]
    (line,) = wait_until(lambda: lines_of(attacked, source), attacked.target.log)
    assert re.search(expected(case), line), line
    assert len(line) < 400
    assert SECRET not in attacked.target.log()


def refused(metrics: dict[str, float], method: str, reason: str) -> float:
    return metrics[f'ssd_refusals_total{{method="{method}",reason="{reason}"}}']


def test_calls_without_end_are_counted_and_have_few_lines(attacked: Attacked) -> None:
    def count() -> float:
        return refused(attacked.target.metrics(), "Generate", "unauthenticated")

    before = count()
    with RawConnection(attacked.target.address, source="127.0.7.9") as client:
        for _ in range(MANY):
            client.until_ended(client.call(headers(GENERATE), framed(b"")))
    wait_until(lambda: count() >= before + MANY)
    assert count() == before + MANY
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
    whole = framed(request(tokens=3).SerializeToString())
    with RawConnection(attacked.target.address, source="127.0.7.11") as client:
        stream = client.until_ended(client.call(headers(GENERATE, bearer(OTHER)), whole))
    assert stream.status[0] == 0
    assert pb.GenerateResponse.FromString(stream.messages()[-1]).HasField("finish")
    assert not lines_of(attacked, "127.0.7.11")
