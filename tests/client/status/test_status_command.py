"""`ssd-client status` and `models`: kinds of drafts, and how rows travel to them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent import futures

import click.testing
import grpc
import pytest

from ssd.v1 import speculation_pb2 as pb
from ssd.v1 import speculation_pb2_grpc, target_pb2
from ssd_client.cli import cli


class ScriptedInfo(speculation_pb2_grpc.SpeculationServiceServicer):
    """A draft that only says what it is."""

    def __init__(self, info: pb.GetDraftInfoResponse) -> None:
        self._info = info

    def GetDraftInfo(self, request, context):
        return self._info


@pytest.fixture
def serve_info() -> Iterator[Callable[..., str]]:
    """Starts drafts that say this of themselves; returns their addresses."""
    with contextlib.ExitStack() as servers:

        def start(**fields: object) -> str:
            server = grpc.server(futures.ThreadPoolExecutor(2))
            servicer = ScriptedInfo(pb.GetDraftInfoResponse(**fields))
            speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            servers.callback(server.stop, 0)
            return f"127.0.0.1:{port}"

        yield start


def run(*arguments: str) -> str:
    done = click.testing.CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_kinds_of_drafts_are_told(serve_info: Callable[..., str]) -> None:
    kinds = {"model": 1, "ngram": 2, "head": 3, "unknown": 99}
    plane = target_pb2.TensorPlaneReport(stream="features\x1b[2J", kind="nccl", state="up")
    drafts = [
        serve_info(name=f"d-{name}", speculator=kind, planes=[plane])
        for name, kind in kinds.items()
    ]
    named = [word for address in drafts for word in ("--draft", address)]
    for command, key in (("status", "services"), ("models", "models")):
        told = run(command, "--json", *named)
        assert [(row["name"], row["kind"]) for row in json.loads(told)[key]] == [
            (f"d-{name}", name) for name in kinds
        ]
        assert "u001b" not in told
        table = run(command, *named)
        assert all(words in table for words in ("EAGLE-3 head", "n-gram", "unknown"))
