"""A target that callers with tokens attack, and others go on using."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.processes import Output, TargetProcess, collect, target
from tests.suite.dealing import shared_services
from tests.waiting import HANG_SECONDS
from tools.attack import callers
from tools.attack.callers import ATTACKER, OTHER, TOKEN_FILE, UNLIMITED, bearer

__all__ = ["ATTACKER", "OTHER", "TOKEN_FILE", "UNLIMITED", "bearer"]


@dataclass
class Attacked:
    folder: Path
    target: TargetProcess

    def stub(self, channel: grpc.Channel) -> rpc.TargetServiceStub:
        return rpc.TargetServiceStub(channel)


def request(prompt: str = "Once upon a time", tokens: int = 8, seed: int = 5) -> pb.GenerateRequest:
    return callers.request(prompt, tokens, seed)


def answer(channel: grpc.Channel, token: str, message: pb.GenerateRequest) -> Output:
    stub = rpc.TargetServiceStub(channel)
    return collect(stub.Generate(message, timeout=HANG_SECONDS, metadata=bearer(token)))


def generate(channel: grpc.Channel, token: str, message: pb.GenerateRequest) -> list[int]:
    return answer(channel, token, message).tokens


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Attacked]:
    (folder / "tokens.toml").write_text(TOKEN_FILE)
    (folder / "tokens.toml").chmod(0o600)
    with target(folder, "--token-file", str(folder / "tokens.toml"), *flags) as process:
        yield Attacked(folder, process)


@shared_services
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with started(tmp_path_factory.mktemp("attacked"), "--metrics-listen", "127.0.0.1:0") as it:
        yield it
