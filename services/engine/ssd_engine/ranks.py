"""Tensor-parallel ranks: processes, and the channel on which they get the next forward.

Rank 0 lives in the engine process and decides; the others follow. A forward travels as raw
integers through shared memory. A rank that dies takes the whole engine down, with its reason in
the log: a collective that misses one of its members would wait for ever.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.batch import Chunk, decode_chunks, encode_chunks, max_encoded_size
from ssd_engine.config import ModelConfig
from ssd_engine.errors import EXIT_RANK_DIED
from ssd_engine.log import setup_logging
from ssd_engine.runner import ModelRunner
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.tensor_parallel import RankGroup, SingleRank, rank_device

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_spawn = multiprocessing.get_context("spawn")


class StepChannel:
    """One integer buffer in shared memory, written by rank 0, read once by every other rank."""

    def __init__(self, capacity: int, readers: int) -> None:
        self._buffer = _spawn.RawArray(ctypes.c_int32, capacity + 1)
        self._posted = [_spawn.Semaphore(0) for _ in range(readers)]
        self._taken = [_spawn.Semaphore(1) for _ in range(readers)]

    def _array(self) -> NDArray[np.int32]:
        return np.frombuffer(memoryview(self._buffer), dtype=np.int32)

    def send(self, values: NDArray[np.int32]) -> None:
        for taken in self._taken:
            taken.acquire()
        array = self._array()
        array[0] = len(values)
        array[1 : 1 + len(values)] = values
        for posted in self._posted:
            posted.release()

    def receive(self, reader: int) -> NDArray[np.int32]:
        self._posted[reader].acquire()
        array = self._array()
        values = array[1 : 1 + array[0]].copy()
        self._taken[reader].release()
        return values


class RankedRunner:
    """Rank 0's runner, and the other ranks at its side."""

    def __init__(
        self, config: ModelConfig, options: RunnerOptions, tp_size: int, role: str, log_level: str
    ) -> None:
        configure_threads(options, tp_size)
        self._channel: StepChannel | None = None
        if tp_size == 1:
            self._runner = ModelRunner(config, options, SingleRank())
            return
        store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        capacity = max_encoded_size(
            max_tokens=options.max_forward_tokens,
            max_sequences=options.max_num_seqs,
            max_blocks_per_sequence=-(-options.max_model_len // options.block_size),
        )
        self._channel = StepChannel(capacity, tp_size - 1)
        self._start_ranks(config, options, tp_size, store.port, role, log_level)
        group = join_group(0, tp_size, store, options)
        self._runner = ModelRunner(config, options, group)

    def _start_ranks(
        self,
        config: ModelConfig,
        options: RunnerOptions,
        tp_size: int,
        port: int,
        role: str,
        log_level: str,
    ) -> None:
        workers: list[BaseProcess] = []
        for rank in range(1, tp_size):
            worker = _spawn.Process(
                target=_rank_main,
                args=(rank, tp_size, port, config, options, self._channel, role, log_level),
                name=f"rank {rank}",
                daemon=True,
            )
            worker.start()
            workers.append(worker)
        threading.Thread(target=_watch_ranks, args=(workers,), daemon=True).start()

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    def forward(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits of the wanted rows, or None when none are wanted."""
        if self._channel is not None:
            self._channel.send(encode_chunks(chunks))
        return self._runner.forward(chunks)


def configure_threads(options: RunnerOptions, tp_size: int) -> None:
    """One core is left to the front process, the others are dealt out to the ranks."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(options.threads or max(1, (cores - 1) // tp_size))
    if options.device == "cpu" and options.dtype == "float32":
        # oneDNN reorders a weight at every call; plain BLAS does not (measured: 2 to 3 times
        # faster for 16 to 64 rows on Arm, the same on x86, where fp32 goes to BLAS anyway).
        torch.backends.mkldnn.set_flags(False)


def join_group(rank: int, size: int, store: Any, options: RunnerOptions) -> RankGroup:
    device = rank_device(options.device, rank)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return RankGroup(rank, size, device)


def _rank_main(
    rank: int,
    size: int,
    port: int,
    config: ModelConfig,
    options: RunnerOptions,
    channel: StepChannel,
    role: str,
    log_level: str,
) -> None:
    setup_logging(role, log_level, rank)
    exit_with_parent()
    ignore_terminal_signals()
    configure_threads(options, size)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    runner = ModelRunner(config, options, join_group(rank, size, store, options))
    log.info("ready")
    while True:
        runner.forward(decode_chunks(channel.receive(rank - 1)))


def _watch_ranks(workers: list[BaseProcess]) -> None:
    connection.wait([worker.sentinel for worker in workers])
    dead = [worker for worker in workers if not worker.is_alive()]
    for worker in dead:
        worker.join()
        log.critical("%s died with exit code %s; the engine stops", worker.name, worker.exitcode)
    os._exit(EXIT_RANK_DIED)


def exit_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def ignore_terminal_signals() -> None:
    """Only the front process listens to the terminal and to SIGTERM; it tells the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
