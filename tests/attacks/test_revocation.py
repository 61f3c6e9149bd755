"""A revoked token is of no use, whatever its owner does to keep the file from being read."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from ssd_engine.errors import ConfigError
from ssd_serving.files.descriptors import KEPT, DescriptorReserve
from ssd_serving.files.reloading import CLOSE_SECONDS, Outdated, Reloading, Unreadable
from tests.attacks.conftest import ATTACKER, OTHER, TOKEN_FILE, Attacked, generate, request
from tests.security.certificates import replace
from tests.waiting import wait_until

Code = grpc.StatusCode


@contextmanager
def no_descriptor_free(attacked: Attacked) -> Iterator[None]:
    """All that the process may have are connections that say nothing."""
    pid, host_port = attacked.target.process.pid, attacked.target.address.rsplit(":", 1)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []

    def number() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    most = number() + 20
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        for _ in range(60):
            held.append(socket.create_connection((host_port[0], int(host_port[1]))))
        wait_until(lambda: number() >= most, "all descriptors are taken")
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for each in held:
            each.close()


def test_it_is_refused_while_no_file_can_be_opened(attacked: Attacked) -> None:
    with attacked.target.channel() as mine, attacked.target.channel() as others:
        assert generate(mine, ATTACKER, request())
        assert generate(others, OTHER, request())
        with no_descriptor_free(attacked):
            revoked = TOKEN_FILE.replace(ATTACKER, "another-token-than-before")
            replace(attacked.token_file, revoked.encode())
            with pytest.raises(grpc.RpcError) as caught:
                generate(mine, ATTACKER, request())
            assert caught.value.code() is Code.UNAUTHENTICATED
            assert generate(others, OTHER, request())
        replace(attacked.token_file, TOKEN_FILE.encode())
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


def test_what_could_not_be_read_is_tried_again_at_every_use(tmp_path: Path) -> None:
    files = Files(tmp_path / "file")
    files.change("two")
    for error in (Unreadable("no descriptor"), OSError(24, "no descriptor")):
        files.error = error
        assert files.values.get() == "one"
    files.error = None
    assert files.values.get() == "two"


def test_what_stays_unreadable_lets_nobody_in(tmp_path: Path) -> None:
    files = Files(tmp_path / "file")
    files.path.unlink()
    assert files.values.get() == "one"
    files.now = CLOSE_SECONDS
    assert files.values.get() == "one"
    files.now = CLOSE_SECONDS + 1
    with pytest.raises(Outdated, match="nobody is let in"):
        files.values.get()
    files.change("two")
    assert files.values.get() == "two"


def test_what_was_read_and_is_bad_leaves_the_last_good_state(tmp_path: Path) -> None:
    files = Files(tmp_path / "file")
    files.change("bad")
    files.error = ConfigError("not TOML")
    assert files.values.get() == "one"
    files.error, files.now = None, 10 * CLOSE_SECONDS
    assert files.values.get() == "one"  # it is looked at when it changes
    files.change("two")
    assert files.values.get() == "two"


def test_a_reserve_is_given_up_for_a_read_and_filled_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    reserve = DescriptorReserve()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert reserve.read((tmp_path / "file").read_text) == "text"
        assert len(reserve._kept) == KEPT
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
