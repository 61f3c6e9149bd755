"""A log that nobody reads any more, such as that of a container whose collector stands still."""

import json
import os
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.processes import SERVING, TargetProcess, collect, target
from tests.waiting import HANG_SECONDS, wait_until

LONG_NAME = "\0" * 256  # of a request; its line in the log has about 3 KB
WRONG = pb.GenerateRequest(text="Once", request_id=LONG_NAME, sampling={"temperature": -1})
STORY = pb.GenerateRequest(text="Once", stop=pb.StopOptions(max_tokens=3, ignore_eos=True))
MUCH = 600  # lines: more than a pipe and the queue before it hold


class Log:
    """The reader's end of a pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._seen = b""

    def read(self) -> list[dict[str, object]]:
        with suppress(BlockingIOError):
            while data := os.read(self._end, 1 << 16):
                self._seen += data
        return [json.loads(line) for line in self._seen.decode().split("\n")[:-1]]


def fill(process: TargetProcess) -> None:
    with process.channel() as channel:
        call = rpc.TargetServiceStub(channel).Generate
        for _ in range(MUCH):
            with pytest.raises(grpc.RpcError, match="temperature"):
                next(call(WRONG, timeout=HANG_SECONDS))


def tells(process: TargetProcess) -> bool:
    return len(collect(process.stub().Generate(STORY, timeout=HANG_SECONDS)).tokens) == 3


def test_the_service_goes_on_and_says_what_was_lost(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    with target(tmp_path, "--log-format", "json", "--log-level", "debug") as process:
        fill(process)
        assert process.health("readiness") == SERVING
        assert tells(process)
        (lost,) = wait_until(lambda: [line for line in log.read() if "lost" in line])
        ended = [line for line in log.read() if line.get("request_id") == LONG_NAME]
        assert 0 < len(ended) < MUCH
        assert isinstance(lost["lost"], int)
        assert len(ended) + lost["lost"] > MUCH  # of others, too
        assert tells(process)
        wait_until(lambda: log.read()[-1].get("outcome") == "length")  # logged as before
        fill(process)
        process.terminate()
        assert process.wait_for_exit() == 0  # though nobody reads its last words
