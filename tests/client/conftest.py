import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.local.fake_mps import FakeMps
from tests.client.scripted_target import Script, ScriptedTarget, serve


@pytest.fixture
def start() -> Iterator[Callable[..., ScriptedTarget]]:
    """Starts a scripted target; all of them stop with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **script: stack.enter_context(serve(Script(**script)))


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as reserved:  # bound, never listening: only who shares it gets the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """NVIDIA's program is on PATH, no daemon runs."""
    folder = tmp_path / "mps"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in [each for each in os.environ if each.startswith(("CUDA_MPS_", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    return FakeMps(folder)
