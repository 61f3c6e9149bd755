"""A process that holds one end of a tensor plane and does what a test tells it."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ssd_engine.tensor_plane import (
    PlaneAnswer,
    PlaneKind,
    PlaneState,
    Receiver,
    RowsFormat,
    RowsKey,
    Sender,
    host_id,
    open_receiver,
    open_sender,
)

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")
FORMAT = RowsFormat(vocab_size=1000, dtype=torch.bfloat16, max_rows=6)
SOON = 20.0  # generous: the machine may be busy

# Forked from a server that has torch loaded: a process costs milliseconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.plane_peer"])


def make_rows(seed: int, num_rows: int, format_: RowsFormat = FORMAT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, format_.vocab_size, generator=generator)
    return rows.to(format_.dtype)


def wait_until(condition: Callable[[], bool], seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("this did not happen")
        time.sleep(0.002)


def wait_for(end: Sender | Receiver, state: PlaneState) -> None:
    wait_until(lambda: end.state is state or end.state is PlaneState.BROKEN)
    if end.state is not state:
        raise RuntimeError(f"the plane broke: {end.reason}")


class Commands:
    """What a test can ask of a peer; arguments and results are plain values."""

    sender: Sender
    receiver: Receiver

    def host_id(self) -> str:
        return host_id()

    def open_sender(self, kind: PlaneKind, epoch: int, **options: Any) -> PlaneAnswer:
        self.sender, answer = open_sender(
            kind, epoch, bind_host=LOOPBACK, rows=FORMAT, device=CPU, **options
        )
        return answer

    def open_receiver(self, answer: PlaneAnswer, epoch: int, **options: Any) -> None:
        self.receiver = open_receiver(answer, epoch, rows=FORMAT, device=CPU, **options)

    def wait_up(self) -> None:
        wait_for(self._end(), PlaneState.UP)

    def send(self, key: RowsKey, num_rows: int, seed: int) -> bool:
        return self.sender.send(key, make_rows(seed, num_rows))

    def send_for_ever(self) -> None:
        """Round after round, in the background, until this process ends."""

        def flood() -> None:
            round_ = 0
            while True:
                self.sender.send(RowsKey(1, round_, 0), make_rows(round_, 6))
                round_ += 1
                time.sleep(0.001)

        threading.Thread(target=flood, daemon=True).start()

    def receive_for_ever(self) -> None:
        def drain() -> None:
            round_ = 0
            while True:
                self.receiver.receive(RowsKey(1, round_, 0), 6, 0.05)
                round_ += 1

        threading.Thread(target=drain, daemon=True).start()

    def counts(self) -> tuple[int, int]:
        return self.sender.sent, self.sender.dropped

    def _end(self) -> Sender | Receiver:
        return self.sender if hasattr(self, "sender") else self.receiver


def _serve(pipe: Connection) -> None:
    commands = Commands()
    while True:
        name, arguments, options = pipe.recv()
        pipe.send(getattr(commands, name)(*arguments, **options))


def _is_stopped(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


@dataclass
class Peer:
    process: Any
    pipe: Connection

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.pipe.send((name, arguments, options))
        if not self.pipe.poll(2 * SOON):
            raise TimeoutError(f"the peer does not answer to {name}")
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        """Returns when none of its threads runs any more."""
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(lambda: all(_is_stopped(task / "stat") for task in tasks.iterdir()))

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def peer() -> Iterator[Peer]:
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Peer(process, ours)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
