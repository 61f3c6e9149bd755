"""A revoked token is of no use, whatever its owner does to keep the file from being read."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from ssd_engine.errors import ConfigError
from ssd_serving.files.descriptors import DescriptorReserve
from ssd_serving.files.reloading import CLOSE_SECONDS, Outdated, Reloading, Unreadable
from tests.attacks.conftest import ATTACKER, OTHER, TOKEN_FILE, Attacked, generate, request
from tests.security.certificates import replace
from tests.waiting import wait_until


@contextmanager
def no_descriptor_free(pid: int, take: Callable[[int], object], spare: int) -> Iterator[None]:
    """All that the process may have are taken: so many more than it has now, and no other."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    most = len(os.listdir(f"/proc/{pid}/fd")) + spare
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        take(most)
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_it_is_refused_while_no_file_can_be_opened(attacked: Attacked) -> None:
    pid, (host, port) = attacked.target.process.pid, attacked.target.address.rsplit(":", 1)
    token_file = attacked.folder / "tokens.toml"
    with ExitStack() as stack:
        mine, others = (stack.enter_context(attacked.target.channel()) for _ in range(2))
        assert generate(mine, ATTACKER, request())
        assert generate(others, OTHER, request())

        def connect(most: int) -> None:
            """Connections that say nothing."""
            for _ in range(60):
                stack.enter_context(socket.create_connection((host, int(port))))
            wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= most, "all are taken")

        with no_descriptor_free(pid, connect, 20):
            replace(token_file, TOKEN_FILE.replace(ATTACKER, "another-token-than-before").encode())
            with pytest.raises(grpc.RpcError) as caught:
                generate(mine, ATTACKER, request())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert generate(others, OTHER, request())
        replace(token_file, TOKEN_FILE.encode())
        assert generate(mine, ATTACKER, request())


class Files:
    """One file, read by a loader that can be told to fail."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 0.0
        self.error: Exception | None = None
        path.write_text("one")
        self.values = Reloading([path], self._load, closes=True, clock=lambda: self.now)

    def _load(self) -> str:
        if self.error is not None:
            raise self.error
        return self.path.read_text()

    def change(self, text: str) -> None:
        replace(self.path, text.encode())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "file")


def test_what_could_not_be_read_is_tried_again_at_every_use(files: Files) -> None:
    files.change("two")
    for error in (Unreadable("no descriptor"), OSError(24, "no descriptor")):
        files.error = error
        assert files.values.get() == "one"
    files.error = None
    assert files.values.get() == "two"


def test_what_stays_unreadable_lets_nobody_in(files: Files) -> None:
    files.path.unlink()
    assert files.values.get() == "one"
    files.now = CLOSE_SECONDS
    assert files.values.get() == "one"
    files.now = CLOSE_SECONDS + 1
    with pytest.raises(Outdated, match="nobody is let in"):
        files.values.get()
    files.change("two")
    assert files.values.get() == "two"


def test_what_was_read_and_is_bad_leaves_the_last_good_state(files: Files) -> None:
    files.change("bad")
    files.error = ConfigError("not TOML")
    assert files.values.get() == "one"
    files.error, files.now = None, 10 * CLOSE_SECONDS
    assert files.values.get() == "one"  # it is looked at when it changes
    files.change("two")
    assert files.values.get() == "two"


def test_a_reserve_is_given_up_for_a_read_and_filled_again(files: Files) -> None:
    reserve = DescriptorReserve()
    with ExitStack() as stack:

        def open_all(_: int) -> None:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))

        with no_descriptor_free(os.getpid(), open_all, 10):
            assert [reserve.read(files.path.read_text) for _ in range(2)] == ["one", "one"]
