"""How a gateway starts, and bounds its callers."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd_gateway.cli import main
from tests.client.scripted_target import Script, ScriptedTarget, serve
from tests.gateway.callers import ask, metrics, post
from tests.processes import GatewayProcess, TracedPair, gateway
from tests.waiting import HANG_SECONDS, wait_until

STORY = "Once upon a time there was a goat."


@pytest.fixture(scope="module")
def talker() -> Iterator[ScriptedTarget]:
    """Says more than sockets hold, and then hangs."""
    with serve(Script(text="goat " * 20_000, tokens=400, hang_after=300)) as model:
        yield model


@pytest.fixture(scope="module")
def hasty(
    talker: ScriptedTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Does not wait long for who reads nothing."""
    folder, flags = tmp_path_factory.mktemp("hasty"), ("--write-timeout", "1")
    with gateway(folder, *flags, targets=[talker.address]) as front:
        yield front


@contextmanager
def lazy_reader(front: GatewayProcess) -> Iterator[socket.socket]:
    host, _, port = front.address.rpartition(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        yield reader


def test_a_reader_that_takes_nothing_is_cut(talker: ScriptedTarget, hasty: GatewayProcess) -> None:
    with lazy_reader(hasty) as reader:
        body = json.dumps({"prompt": STORY, "max_tokens": 400, "stream": True}).encode()
        reader.sendall(post("/v1/completions", body))
        wait_until(lambda: "a stream was cut" in hasty.log(), hasty.log)
        assert talker.cancelled.wait(HANG_SECONDS)
        wait_until(lambda: is_reset(reader), hasty.log)
        assert "ERROR" not in hasty.log()


def test_a_reader_that_takes_no_whole_answer_is_cut(hasty: GatewayProcess) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with lazy_reader(hasty) as reader:
        while not is_reset(reader):  # as many answers as it takes to fill what sockets hold
            with suppress(ConnectionError, BlockingIOError):
                reader.send(asked, socket.MSG_DONTWAIT)


def test_metrics_tell_what_was_served(gateway: GatewayProcess) -> None:
    before = metrics(gateway)["ssd_gateway_tokens_total"]
    content = {"prompt": STORY, "stream": True, "ignore_eos": True, "max_tokens": 7}
    ask(gateway, "/v1/completions", content).read()
    wait_until(lambda: metrics(gateway)["ssd_gateway_tokens_total"] == before + 7, gateway.log)
    assert metrics(gateway)["ssd_gateway_targets_ready"] == 1


def is_reset(connection: socket.socket) -> bool:
    """Whether its end is known, before anything is read of what has come."""
    events = select.poll()
    events.register(connection, select.POLLHUP)
    return bool(events.poll(50))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--target"),
        (["--target", "nowhere"], "--target"),
        (["--target", "h:1", "--listen", "0.0.0.0:8000"], "--listen"),
        (["--target", "h:1", "--tls-cert", "a.crt"], "--tls-key"),
        (["--target", "h:1", "--max-body-mib", "0"], "--max-body-mib"),
        (["--target", "h:1", "--cors-origin", "app"], "--cors-origin"),
        (["--target", "h:1", "--token-file", "/nowhere.toml"], "--token-file"),
    ],
)
def test_a_wrong_option_is_named(flags: list[str], named: str) -> None:
    done = CliRunner().invoke(main, ["serve", "--check-config", *flags])
    assert (done.exit_code, named in done.stderr) == (2, True), done.stderr
    assert done.stderr.startswith("error: ")


def test_drafts_that_are_not_asked_are_said_to_be_missing(
    traced_pair: TracedPair, tmp_path: Path
) -> None:
    address = traced_pair[0].address
    with gateway(tmp_path, "--no-draft-traces", targets=[address]) as front:
        ask(front, "/v1/completions", {"prompt": STORY, "max_tokens": 4}).read()
        timeline = json.load(ask(front, f"/ssd/timeline?target={address}"))
    assert [track["role"] for track in timeline["tracks"]] == ["target"]
    assert timeline["problem"] == "drafts are not asked for their part (--no-draft-traces)"
