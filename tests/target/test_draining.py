"""The end of a target, in all the states in which SIGTERM may find it. Exit code 0 in each."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.process_tree import engine_held
from tests.processes import TargetProcess, draft, link_states, target
from tests.target.refusals import refusal, retry_seconds
from tests.waiting import HANG_SECONDS, wait_until

UP, DOWN = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def request(tokens: int, seed: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingOptions(temperature=1.0, seed=seed),
        stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
    )


@contextmanager
def watching(server: TargetProcess) -> Iterator[list[int]]:
    """What a watch of readiness hears."""
    heard: list[int] = []
    with server.channel() as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="readiness")
        )

        def follow() -> None:
            with contextlib.suppress(grpc.RpcError):
                for answer in call:
                    heard.append(answer.status)

        thread = threading.Thread(target=follow)
        thread.start()
        yield heard
        thread.join(HANG_SECONDS)


def assert_handed_over(call: Any, words: str) -> None:
    error = refusal(call, grpc.StatusCode.UNAVAILABLE)
    assert retry_seconds(error) > 0
    assert words in error.details()


def test_what_runs_is_finished_what_waits_is_handed_over_what_is_new_is_refused(
    tmp_path: Path,
) -> None:
    """And an idle link to a draft, a watch of health, a second SIGTERM change nothing of it."""
    with contextlib.ExitStack() as stack:
        drafting = stack.enter_context(draft(tmp_path / "draft", model=None))
        flags = ("--draft", drafting.address, "--max-num-seqs", "1", "--threads", "1")
        server = stack.enter_context(target(tmp_path / "target", *flags))
        stub = rpc.TargetServiceStub(stack.enter_context(server.channel()))
        wait_until(lambda: link_states(server) == ["up"])
        running = stub.Generate(request(200), timeout=HANG_SECONDS)
        assert next(running).WhichOneof("event") == "started"
        tokens = list(next(running).tokens.token_ids)  # it has begun: what comes now waits
        with engine_held(server.process.pid):
            waiting = [stub.Generate(request(5), timeout=HANG_SECONDS) for _ in range(2)]
            for call in waiting:
                assert next(call).WhichOneof("event") == "started"
            watch = stack.enter_context(watching(server))
            wait_until(lambda: watch == [UP])
            server.terminate()
            wait_until(lambda: watch == [UP, DOWN])
            server.terminate()
            late = stub.Generate(request(5), timeout=HANG_SECONDS)
            assert_handed_over(late, "draining")
            assert (server.health("readiness"), server.health("liveness")) == (DOWN, UP)
            assert server.process.poll() is None
        for call in waiting:
            assert_handed_over(call, "had not begun")
        tokens += [t for response in running for t in response.tokens.token_ids]
        assert len(tokens) == 200
        assert server.wait_for_exit() == 0
        assert "drained" in server.log()
        assert "Traceback" not in server.log()
        wait_until(lambda: "has left" in drafting.log())


@pytest.mark.parametrize("module", ["ssd_target", "ssd_draft"])
def test_a_signal_before_anything_has_begun_ends_it_too(module: str) -> None:
    """Python itself needs some time to get as far as a handler."""
    code = (
        "import os, signal, sys, threading, runpy\n"
        "from ssd_serving import command_line\n"
        "plain = command_line._early_end\n"
        "def early():\n"
        "    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    return plain()\n"
        "command_line._early_end = early\n"
        f"sys.argv = ['{module}', 'serve', 'stories-draft', '--listen', '127.0.0.1:0']\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stderr.count(b"Traceback")) == (0, 0)
