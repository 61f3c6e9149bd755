"""The channel on which the ranks of a node get the next forward. No torch here."""

import ctypes
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import max_encoded_size

GO = b"\0"
_spawn = multiprocessing.get_context("spawn")


class StepReader:
    """One rank's end of the channel."""

    def __init__(self, buffer: Any, pipe: Connection) -> None:
        self._buffer = buffer
        self._pipe = pipe

    def receive(self) -> NDArray[np.int32]:
        self._pipe.recv_bytes()
        array = _as_array(self._buffer)
        values = array[1 : 1 + array[0]].copy()
        self._pipe.send_bytes(GO)
        return values


class StepChannel:
    """One integer buffer in shared memory, written by one process, read once by every rank.

    A byte on a pipe says that the buffer is written; one back, that it was read.
    """

    def __init__(self, capacity: int, readers: int) -> None:
        self._buffer = _spawn.RawArray(ctypes.c_int32, capacity + 1)
        pairs = [_spawn.Pipe() for _ in range(readers)]
        self.pipes = [ours for ours, _ in pairs]
        self.readers = [StepReader(self._buffer, theirs) for _, theirs in pairs]
        self._unread = 0

    @property
    def free(self) -> bool:
        """Whether the next send does not wait."""
        return self._unread == 0

    def hear(self, pipe: Connection) -> None:
        """A reader's byte back, by who watches the pipes in order not to wait in send."""
        pipe.recv_bytes()
        self._unread -= 1

    def send(self, values: NDArray[np.int32]) -> None:
        if self._unread:
            for pipe in self.pipes:
                pipe.recv_bytes()
        array = _as_array(self._buffer)
        array[0] = len(values)
        array[1 : 1 + len(values)] = values
        for pipe in self.pipes:
            pipe.send_bytes(GO)
        self._unread = len(self.pipes)


def _as_array(buffer: Any) -> NDArray[np.int32]:
    return np.frombuffer(memoryview(buffer), dtype=np.int32)


def step_capacity(options: RunnerOptions) -> int:
    """Integers of the largest step, its kind included."""
    return 1 + max_encoded_size(
        max_tokens=options.max_forward_tokens,
        max_sequences=options.max_num_seqs,
        max_blocks_per_sequence=-(-options.max_model_len // options.block_size),
        max_tail=options.max_tail,
    )
