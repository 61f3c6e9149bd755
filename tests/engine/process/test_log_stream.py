"""A log whose reader stops: nobody who writes waits, and what is lost is counted."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from io import TextIOWrapper

import pytest

from ssd_engine.process.log_stream import QueuedStream
from tests.waiting import HANG_SECONDS, wait_until

PAGE = 4096
QUEUE = 10_000
LINES = 1000


class Reader:
    """The other end of a small pipe, read when it is told to."""

    def __init__(self) -> None:
        self.end, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PAGE)
        os.set_blocking(self.end, False)
        self.stream = QueuedStream(TextIOWrapper(os.fdopen(into, "wb")), QUEUE)
        self._seen = b""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self._seen += os.read(self.end, 1 << 20)
        return self._seen.decode()

    def lines_until(self, last: str) -> list[str]:
        wait_until(lambda: self.read().endswith(last), self.read)
        return self._seen.decode().splitlines()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    if reader.end >= 0:
        os.close(reader.end)


def say_much(reader: Reader) -> None:
    for number in range(LINES):
        reader.stream.write(f"line {number} {'x' * 100}\n")


def test_who_writes_does_not_wait_and_hears_what_was_lost(reader: Reader) -> None:
    say_much(reader)
    assert not reader.stream.drain(0.01)
    lines = reader.lines_until("lines were lost\n")
    lost = int(lines.pop().split()[0])
    assert [line.split()[1] for line in lines] == [str(n) for n in range(LINES - lost)]
    held = sum(len(line) + 1 for line in lines)
    assert QUEUE - 200 < held <= QUEUE + 2 * PAGE  # in the queue, being written, and in the pipe
    assert reader.stream.drain(HANG_SECONDS)
    reader.stream.write("and on\n")
    assert reader.lines_until("and on\n")[-2].endswith("lines were lost")


def test_a_line_that_is_longer_than_the_queue_is_not_lost(reader: Reader) -> None:
    reader.stream.write("y" * 5 * QUEUE + "\n")
    assert reader.lines_until("y\n") == ["y" * 5 * QUEUE]


def test_lines_of_many_threads_stay_whole(reader: Reader) -> None:
    def say(who: int) -> None:
        for _ in range(10):
            reader.stream.write(f"{who} " * 20 + "\n")

    threads = [threading.Thread(target=say, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: reader.read().count("\n") == 80)
    assert all(len(set(line.split())) == 1 for line in reader.read().splitlines())


def test_a_reader_who_has_gone_holds_nobody_up(reader: Reader) -> None:
    os.close(reader.end)
    reader.end = -1
    say_much(reader)
    assert reader.stream.drain(HANG_SECONDS)
