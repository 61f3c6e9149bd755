"""A service whose gRPC accepts no calls any more ends: its probes may have a port of their own."""

import os
from pathlib import Path

import pytest

from ssd_client import Client
from tests.processes import SERVING, target

# What gRPC does by itself to a server whose loop has failed, once the file is there.
DEAF = """
import asyncio, os
import grpc.aio

make = grpc.aio.server

def server(*arguments, **options):
    made = make(*arguments, **options)

    async def end():
        while not os.path.exists(os.environ["DEAF"]):
            await asyncio.sleep(0.05)
        await made._server.shutdown(3600)

    made.ending = asyncio.ensure_future(end())
    return made

grpc.aio.server = server
"""


def test_a_service_that_accepts_no_calls_finishes_what_runs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("DEAF", str(tmp_path / "deaf"))
    with target(tmp_path / "target") as service, Client(service.address) as client:
        assert service.health("liveness") == SERVING
        with client.stream("Once", max_tokens=120, ignore_eos=True) as stream:
            pieces = stream.text()
            next(pieces)
            (tmp_path / "deaf").touch()
            assert list(pieces)
        assert len(stream.result.token_ids) == 120
        assert service.wait_for_exit() == 1
        assert "gRPC accepts no calls any more" in service.log()
