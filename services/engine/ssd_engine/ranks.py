"""Tensor-parallel ranks: processes, and the channel on which they get the next forward.

Rank 0 lives in the engine process and decides; the others follow. A forward travels as raw
integers through shared memory. A rank that dies takes the whole engine down, with its reason in
the log: a collective that misses one of its members would wait for ever.
"""

import ctypes
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.batch import Draw, Part, decode_parts, encode_parts, max_encoded_size
from ssd_engine.config import ModelConfig
from ssd_engine.errors import EXIT_RANK_DIED, ConfigError
from ssd_engine.log import setup_logging, uncaught_logged
from ssd_engine.processes import exit_with_parent
from ssd_engine.runner import ModelRunner
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.scored import Pending, Scored
from ssd_engine.tensor_parallel import RankGroup, SingleRank, rank_device

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
GO = b"\0"
FORWARD, STEP = 0, 1
VERDICT_SECONDS = 5.0
_spawn = multiprocessing.get_context("spawn")


def _nothing() -> None:
    pass


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
    """One integer buffer in shared memory, written by rank 0, read once by every other rank.

    A byte on a pipe says that the buffer is written; one back, that it was read.
    """

    def __init__(self, capacity: int, readers: int) -> None:
        self._buffer = _spawn.RawArray(ctypes.c_int32, capacity + 1)
        pairs = [_spawn.Pipe() for _ in range(readers)]
        self._pipes = [ours for ours, _ in pairs]
        self.readers = [StepReader(self._buffer, theirs) for _, theirs in pairs]
        self._unread = False

    def send(self, values: NDArray[np.int32]) -> None:
        if self._unread:
            for pipe in self._pipes:
                pipe.recv_bytes()
        array = _as_array(self._buffer)
        array[0] = len(values)
        array[1 : 1 + len(values)] = values
        for pipe in self._pipes:
            pipe.send_bytes(GO)
        self._unread = True


def _as_array(buffer: Any) -> NDArray[np.int32]:
    return np.frombuffer(memoryview(buffer), dtype=np.int32)


class RankedRunner:
    """Rank 0's runner, and the other ranks at its side."""

    def __init__(
        self,
        config: ModelConfig,
        options: RunnerOptions,
        tp_size: int,
        role: str,
        log_level: str,
        log_format: str = "text",
    ) -> None:
        check_devices(options, tp_size)
        configure_threads(options, tp_size)
        self._channel: StepChannel | None = None
        if tp_size == 1:
            self._runner = ModelRunner(config, options, SingleRank())
            return
        store = loopback_store()
        capacity = 1 + max_encoded_size(
            max_tokens=options.max_forward_tokens,
            max_sequences=options.max_num_seqs,
            max_blocks_per_sequence=-(-options.max_model_len // options.block_size),
            max_tail=options.max_tail,
        )
        self._channel = StepChannel(capacity, tp_size - 1)
        start = RankStart(config, options, tp_size, store.port, role, log_level, log_format)
        _start_ranks(start, self._channel.readers)
        group = join_group(0, tp_size, store, options)
        self._runner = ModelRunner(config, options, group)

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def asynchronous(self) -> bool:
        return self._runner.asynchronous

    @property
    def chains(self) -> bool:
        return self._runner.chains

    @property
    def gap_seconds(self) -> float:
        return self._runner.gap_seconds

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None] = _nothing
    ) -> Tensor | None:
        """Logits of the wanted rows, or None when none are wanted.

        ``launched`` is called as soon as the device has its work, which on a CPU is at once.
        """
        if self._channel is None:
            return self._runner.forward(parts, launched)
        with leaving_the_verdict():
            self._tell_others(self._channel, FORWARD, parts)
            return self._runner.forward(parts, launched)

    def step(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        launched: Callable[[], None] = _nothing,
    ) -> Pending:
        """A forward over few rows of each sequence, which may be computed meanwhile.

        ``draws``: of every row that asks for logits; None where its token is not drawn there.
        """
        if self._channel is None:
            return self._runner.step(parts, draws, launched)
        with leaving_the_verdict():
            self._tell_others(self._channel, STEP, parts)
            return PendingOnRanks(self._runner.step(parts, draws, launched))

    def _tell_others(self, channel: StepChannel, kind: int, parts: Sequence[Part]) -> None:
        channel.send(np.concatenate(([np.int32(kind)], encode_parts(parts))))


class PendingOnRanks:
    """A step of several ranks, any of which may die until its result is there."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self.rows = pending.rows

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Scored:
        with leaving_the_verdict():
            return self._pending.result()


@contextmanager
def leaving_the_verdict() -> Iterator[None]:
    """A collective or a pipe fails the moment a rank dies. The watcher knows which one, says so,
    and ends this process."""
    try:
        yield
    except (RuntimeError, OSError, EOFError):
        time.sleep(VERDICT_SECONDS)
        raise


def check_devices(options: RunnerOptions, tp_size: int) -> None:
    if options.device != "cuda":
        return
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible < tp_size:
        raise ConfigError(f"--device cuda with --tp {tp_size}: {visible} CUDA devices are visible")


def configure_threads(options: RunnerOptions, tp_size: int) -> None:
    """One core is left to the front process, the others are dealt out to the ranks."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(options.threads or max(1, (cores - 1) // tp_size))
    if options.device == "cpu" and options.dtype == "float32":
        # oneDNN reorders a weight at every call; plain BLAS does not (measured: 2 to 3 times
        # faster for 16 to 64 rows on Arm, the same on x86, where fp32 goes to BLAS anyway).
        torch.backends.mkldnn.set_flags(False)


def loopback_store() -> dist.TCPStore:
    """A store that listens on loopback alone: left to itself it takes every interface."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_group(rank: int, size: int, store: Any, options: RunnerOptions) -> RankGroup:
    device = rank_device(options.device, rank)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return RankGroup(rank, size, device)


@dataclass(frozen=True)
class RankStart:
    """What a rank's process is started with."""

    config: ModelConfig
    options: RunnerOptions
    size: int
    port: int
    role: str
    log_level: str
    log_format: str


def _start_ranks(start: RankStart, readers: Sequence[StepReader]) -> None:
    workers: list[BaseProcess] = []
    for rank, reader in enumerate(readers, start=1):
        worker = _spawn.Process(
            target=_rank_main, args=(rank, start, reader), name=f"rank {rank}", daemon=True
        )
        worker.start()
        workers.append(worker)
    threading.Thread(target=_watch_ranks, args=(workers,), daemon=True).start()


def _rank_main(rank: int, start: RankStart, steps: StepReader) -> None:
    setup_logging(start.role, start.log_level, rank, start.log_format)
    exit_with_parent()
    with uncaught_logged():
        _follow_steps(rank, start, steps)


def _follow_steps(rank: int, start: RankStart, steps: StepReader) -> None:
    configure_threads(start.options, start.size)
    store = dist.TCPStore(LOOPBACK, start.port, is_master=False)
    group = join_group(rank, start.size, store, start.options)
    runner = ModelRunner(start.config, start.options, group)
    log.info("ready")
    while True:
        kind, *_ = values = steps.receive()
        parts = decode_parts(values[1:])
        if kind == STEP:
            runner.step(parts, [None] * sum(part.num_logits for part in parts)).result()
        else:
            runner.forward(parts)


def _watch_ranks(workers: list[BaseProcess]) -> None:
    ended = connection.wait([worker.sentinel for worker in workers])
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()
            log.critical(
                "%s died with exit code %s; the engine stops", worker.name, worker.exitcode
            )
    os._exit(EXIT_RANK_DIED)
