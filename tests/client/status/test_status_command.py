"""`ssd-client status` and `models`: kinds of drafts, and how rows travel to them."""

from __future__ import annotations

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
    servers = []

    def start(**fields: object) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        servicer = ScriptedInfo(pb.GetDraftInfoResponse(**fields))
        speculation_pb2_grpc.add_SpeculationServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0)


def run(*arguments: str) -> str:
    done = click.testing.CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_kinds_of_drafts_are_told(serve_info: Callable[..., str]) -> None:
    kinds = {"model": 1, "ngram": 2, "head": 3, "unknown": 99}
    drafts = [serve_info(name=f"d-{name}", speculator=kind) for name, kind in kinds.items()]
    named = [word for address in drafts for word in ("--draft", address)]
    for command, key in (("status", "services"), ("models", "models")):
        rows = json.loads(run(command, "--json", *named))[key]
        assert [(row["name"], row["kind"]) for row in rows] == [
            (f"d-{name}", name) for name in kinds
        ]
        table = run(command, *named)
        for words in ("EAGLE-3 head", "n-gram", "unknown"):
            assert words in table


def test_a_head_says_what_it_reads_and_how_it_comes(serve_info: Callable[..., str]) -> None:
    plane = target_pb2.TensorPlaneReport(stream="features\x1b[2J", kind="nccl", state="up", rows=9)
    terms = pb.FeatureTerms(boundaries=[2, 16, 29], hidden_size=4096, dtype="bfloat16")
    address = serve_info(
        name="head", speculator=pb.SPECULATOR_KIND_HEAD, features=terms, planes=[plane]
    )
    (row,) = json.loads(run("status", "--json", "--draft", address))["services"]
    assert row["features"]["boundaries"] == [2, 16, 29]
    assert (row["planes"][0]["kind"], row["planes"][0]["rows"]) == ("nccl", 9)
    assert "\x1b" not in row["planes"][0]["stream"]
