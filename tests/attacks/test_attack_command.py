"""`make attack` leads real attacks from another address, and says what others notice."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.attack import afar
from tools.attack.__main__ import main
from tools.attack.watch import Phase, Row

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900


def attack(*names: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tools.attack", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


def phase(first_ms: float, mib: float = 800, files: int = 40) -> Phase:
    return Phase([first_ms] * 20, [mib], [files])


@pytest.mark.parametrize(
    ("during", "after", "problems"),
    [
        (phase(90), phase(12), []),
        (phase(120), phase(12), ["first token during it: 120 ms"]),
        (phase(12), phase(300), ["first token after it: 300 ms"]),
        (phase(12, mib=1200), phase(12, mib=1200), ["400 MiB more"]),
        (phase(12, files=1000), phase(12, files=1000), ["1000 files, 40 before"]),
        (phase(12, mib=1000, files=1000), phase(12), []),
    ],
)
def test_what_others_notice_is_told(during: Phase, after: Phase, problems: list[str]) -> None:
    row = Row("storm", phase(11), during, after)
    row.judge()
    assert row.problems == problems


def test_attackers_come_from_another_address() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, _, port = afar.forwarded(f"127.0.0.1:{server.getsockname()[1]}").rpartition(":")
        near = stack.enter_context(socket.create_connection((host, int(port))))
        near.sendall(b"hello")
        far, address = server.accept()
        stack.enter_context(far)
        assert (far.recv(5), address[0]) == (b"hello", afar.HOST)
        far.sendall(b"there")
        assert near.recv(5) == b"there"


def test_an_attack_that_is_not_known_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["attack", "flood"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no such attack: flood; there are cancel_storm, " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
def test_every_attack_is_led_and_nothing_is_confirmed_or_lost() -> None:
    """How long others wait depends on the machine: it is printed, and not asserted."""
    told = attack().stdout
    wanted = (
        "24 of 24 probes answered",
        "24 of 24 newcomers were served",
        "0 of which were refused",
        "tls_alone: refused by 3 of 3 services",
        "0 cached tokens told at most",
        "rotten_weights: not gone on with",
        "strangers: two nodes are ready",
        "draft engine: readiness off",
    )
    assert [line for line in wanted if line not in told] == [], told
    assert "ANOTHER TEXT" not in told
