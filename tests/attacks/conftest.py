"""A target that callers with tokens attack, and others go on using."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from ssd.v1 import target_pb2 as pb
from ssd.v1 import target_pb2_grpc as rpc
from tests.processes import TargetProcess, collect, target
from tests.suite.dealing import shared_services
from tests.waiting import HANG_SECONDS
from tools.attack import callers
from tools.attack.callers import ATTACKER, OTHER, TOKEN_FILE, bearer

__all__ = ["ATTACKER", "OTHER", "TOKEN_FILE", "Attacked", "bearer", "generate", "request"]


@dataclass
class Attacked:
    folder: Path
    target: TargetProcess

    @property
    def token_file(self) -> Path:
        return self.folder / "tokens.toml"

    def stub(self, channel: grpc.Channel) -> rpc.TargetServiceStub:
        return rpc.TargetServiceStub(channel)


def request(prompt: str = "Once upon a time", tokens: int = 8, seed: int = 5) -> pb.GenerateRequest:
    return callers.request(prompt, tokens, seed)


def generate(channel: grpc.Channel, token: str, message: pb.GenerateRequest) -> list[int]:
    stub = rpc.TargetServiceStub(channel)
    call = stub.Generate(message, timeout=HANG_SECONDS, metadata=bearer(token))
    return collect(call).tokens


@shared_services
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "tokens.toml").write_text(TOKEN_FILE)
    (folder / "tokens.toml").chmod(0o600)
    flags = ["--token-file", str(folder / "tokens.toml"), "--metrics-listen", "127.0.0.1:0"]
    with target(folder, *flags) as process:
        yield Attacked(folder, process)
