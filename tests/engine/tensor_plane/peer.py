"""A process that holds one end of a tensor plane and does what a test tells it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ssd_engine.process.nccl_library import share_gpus
from ssd_engine.tensor_plane.end import PlaneEnd
from ssd_engine.tensor_plane.plane import AgreedPlane, await_target, go_to_draft
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey, dtype_of
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports import connection as connection_module
from ssd_engine.tensor_plane.transports import greeting as greeting_module
from ssd_engine.tensor_plane.transports import process_group as process_group_module
from tests.suite.forked_services import start_process
from tests.waiting import HANG_SECONDS, wait_until

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")
DISTRIBUTIONS = RowsStream("draft_distributions", RowsDirection.TO_TARGET, 1000, "bfloat16", 6)
FEATURES = RowsStream("features", RowsDirection.TO_DRAFT, 96, "float32", 9)

# However slow the machine is, nobody is given up: only a test that moves the clock meets a limit.
NO_LIMIT = 4 * HANG_SECONDS
LIMITS = (
    (connection_module, "STALL_SECONDS"),
    (process_group_module, "STALL_SECONDS"),
    (greeting_module, "HELLO_SECONDS"),
)


def make_rows(seed: int, num_rows: int, stream: RowsStream = DISTRIBUTIONS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, stream.width, generator=generator).to(dtype_of(stream))


_USUAL: dict[str, Any] = {"device": CPU, "connect_timeout_s": NO_LIMIT}


def make_drafts_end(
    kind: PlaneKind, epoch: int = 1, stream: RowsStream = DISTRIBUTIONS, **options: Any
) -> tuple[AgreedPlane, PlaneAnswer]:
    return await_target(kind, epoch, stream, **{"bind_host": LOOPBACK, **_USUAL, **options})


def make_targets_end(
    answer: PlaneAnswer, epoch: int = 1, stream: RowsStream = DISTRIBUTIONS, **options: Any
) -> AgreedPlane:
    return go_to_draft(answer, epoch, stream, **{**_USUAL, **options})


def make_sender(
    kind: PlaneKind, epoch: int = 1, max_queued: int = 64, **options: Any
) -> tuple[Sender, PlaneAnswer]:
    """At the draft."""
    plane, answer = make_drafts_end(kind, epoch, **options)
    return Sender(plane, max_queued), answer


def make_receiver(
    answer: PlaneAnswer, epoch: int = 1, max_expected: int = 256, **options: Any
) -> Receiver:
    """At the target."""
    return Receiver(make_targets_end(answer, epoch, **options), max_expected)


def wait_up(*ends: PlaneEnd) -> None:
    for end in ends:
        wait_until(lambda end=end: end.state is not PlaneState.CONNECTING)  # type: ignore[misc]
        if end.state is not PlaneState.UP:
            raise RuntimeError(f"the plane broke: {end.reason}")


class Commands:
    """What a test can ask of a peer; arguments and results are plain values."""

    sender: Sender
    receiver: Receiver

    def share_gpus(self) -> str | None:
        return share_gpus()

    def open_sender(self, kind: PlaneKind, epoch: int, **options: Any) -> PlaneAnswer:
        self.sender, answer = make_sender(kind, epoch, **options)
        return answer

    def open_features(self, answer: PlaneAnswer, epoch: int) -> None:
        self.sender = Sender(make_targets_end(answer, epoch, FEATURES))

    def open_receiver(self, answer: PlaneAnswer, epoch: int, **options: Any) -> None:
        self.receiver = make_receiver(answer, epoch, **options)

    def wait_up(self) -> None:
        wait_up(self._end())

    def send(self, key: RowsKey, num_rows: int, seed: int) -> bool:
        return self.sender.send(key, make_rows(seed, num_rows, self.sender._stream))

    def flood(self, num_rounds: int) -> None:
        """Round after round, in the background, as fast as they are made."""

        def run() -> None:
            for round_ in range(num_rounds):
                self.sender.send(RowsKey(1, round_), make_rows(round_, 6))

        threading.Thread(target=run, daemon=True).start()

    def _end(self) -> Sender | Receiver:
        return self.sender if hasattr(self, "sender") else self.receiver


def _serve(pipe: Connection) -> None:
    for module, name in LIMITS:
        setattr(module, name, NO_LIMIT)
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
        if not self.pipe.poll(HANG_SECONDS):
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
    ours, theirs = Pipe()
    process = start_process("peer", _serve, theirs)
    theirs.close()
    try:
        yield Peer(process, ours)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
