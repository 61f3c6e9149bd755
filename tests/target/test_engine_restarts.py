"""An engine that ends is started again behind its front: links, streams and callers go on."""

import os
import signal
from pathlib import Path

import pytest

from ssd_client import Client
from tests.process_tree import computing, is_alive
from tests.processes import ServiceProcess, draft, link_states, target, wait_until_ready
from tests.suite.scale import full_only
from tests.waiting import wait_until

PROMPT = "Once upon a time"
OPTIONS = {"max_tokens": 150, "temperature": 0.7, "seed": 3, "ignore_eos": True}


def kill_engine(service: ServiceProcess) -> None:
    """Its last process: a rank, where there are several."""
    engine = computing(service.process.pid)[-1]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not is_alive(engine))


@pytest.mark.parametrize("ranks", [1, full_only(2)])
def test_streams_end_as_they_would_have_and_links_come_back(tmp_path: Path, ranks: int) -> None:
    with draft(tmp_path / "draft") as endpoint:
        flags = ["--draft", endpoint.address, "--tp", str(ranks)]
        with (
            target(tmp_path / "target", *flags) as server,
            Client(server.address, retries=5) as client,
        ):
            wait_until(lambda: link_states(server) == ["up"], server.log)
            expected = client.generate(PROMPT, **OPTIONS).text
            for killed in (server, endpoint):
                with client.stream(PROMPT, **OPTIONS) as stream:
                    pieces = stream.text()
                    text = next(pieces)
                    kill_engine(killed)
                    assert text + "".join(pieces) == expected
                wait_until(lambda: link_states(server) == ["up"], server.log)
                wait_until_ready(killed)
                assert client.generate(PROMPT, **OPTIONS, mode="ssd").text == expected
                assert "it is started again, 1 of 3 times" in killed.log()
                assert "Traceback" not in killed.log()
            server.terminate()
            assert server.wait_for_exit() == 0


def test_one_that_ends_too_often_ends_the_service_with_its_reason(tmp_path: Path) -> None:
    with target(tmp_path, "--engine-restarts", "1") as server:
        kill_engine(server)
        wait_until(lambda: server.log().count(" ready: ") == 2, server.log)
        kill_engine(server)
        assert server.wait_for_exit() == 1
        assert "the service ends: the engine process ended with exit code -9" in server.log()
