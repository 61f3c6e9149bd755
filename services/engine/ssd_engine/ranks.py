"""Tensor-parallel ranks: rank 0 lives in the engine process and decides; the others follow.

A forward travels as raw integers: through shared memory on a node, on a connection to other nodes
(``cluster/``). A rank that dies takes the whole engine down, with its reason in the log: a
collective that misses one of its members would wait for ever.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.batch import Draw, Part, decode_parts, encode_parts
from ssd_engine.cluster.interface import interface_of
from ssd_engine.cluster.leader import Leader
from ssd_engine.cluster.options import ClusterOptions
from ssd_engine.cluster.store import NodeStore
from ssd_engine.cluster.wire import Broken
from ssd_engine.config import ModelConfig
from ssd_engine.errors import EXIT_RANK_DIED, ConfigError
from ssd_engine.kv_swap import Swap
from ssd_engine.log import end_process, setup_logging, uncaught_logged
from ssd_engine.processes import exit_with_parent
from ssd_engine.rank_processes import Place, RankStart, StoreLink, start_ranks
from ssd_engine.runner import ModelRunner
from ssd_engine.runner_options import RunnerOptions
from ssd_engine.scored import Pending, Scored
from ssd_engine.step_channel import StepChannel, StepReader, step_capacity
from ssd_engine.tensor_parallel import GroupThroughHost, RankGroup, SingleRank, rank_device

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FORWARD, STEP, SWAP, ALLOCATE = 0, 1, 2, 3
VERDICT_SECONDS = 5.0
GLOO_AT_ADDRESS = "gloo_at_address"
NCCL_SHARES_GPUS = (2, 30)


def _nothing() -> None:
    pass


class Channel(Protocol):
    """To all other ranks."""

    def send(self, values: NDArray[np.int32]) -> None: ...


class NodesChannel:
    """To the ranks of other nodes, which take longer to reach, and then to those of this one."""

    def __init__(self, leader: Leader, here: StepChannel) -> None:
        self._leader = leader
        self._here = here

    def send(self, values: NDArray[np.int32]) -> None:
        self._leader.send_step(values)
        self._here.send(values)


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
        cluster: ClusterOptions | None = None,
    ) -> None:
        """``cluster``: the nodes that share the ranks; None: all are on this one."""
        here = tp_size if cluster is None else tp_size // cluster.nodes
        check_devices(options, here)
        configure_threads(options, here)
        self._channel: Channel | None = None
        if tp_size == 1:
            self._runner = ModelRunner(config, options, SingleRank())
            return
        start = RankStart(config, options, Place(tp_size, 0, here), role, log_level, log_format)
        begin = _on_one_node if cluster is None else _on_several_nodes(cluster)
        with leaving_the_verdict():
            self._channel, group = begin(start)
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

    def draw(self, logits: Tensor | None, draws: Sequence[Draw | None]) -> Scored:
        """Draws from the logits of a forward, which the first rank has."""
        return self._runner.draw(logits, draws)

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

    def deepen(
        self, flight: Pending, slots: Sequence[int], widths: Sequence[int]
    ) -> Pending | None:
        """The step after one over trees alone; None: it is to be said in full. See ModelRunner."""
        return self._runner.deepen(flight, slots, widths) if self._channel is None else None

    @property
    def block_bytes(self) -> int:
        """The memory of a KV block, that of all ranks on this node together."""
        return self._runner.kv.spec.bytes_per_block * self._runner.tp.local_size

    def allocate_host_blocks(self, number: int) -> None:
        """Where KV is copied to by ``swap``, on every rank."""
        if self._channel is None:
            self._runner.host_copies.allocate(number)
            return
        with leaving_the_verdict():
            self._channel.send(np.array([ALLOCATE, number], dtype=np.int32))
            self._runner.host_copies.allocate(number)

    def seconds_of_a_swap(self) -> float:
        """The time in which one block is copied out and in."""
        return self._runner.host_copies.seconds_of_a_block()

    def swap(self, swap: Swap) -> None:
        """Copies KV between device and host, in the order of forwards."""
        if self._channel is None:
            self._runner.swap(swap)
            return
        with leaving_the_verdict():
            self._channel.send(np.array([SWAP, *swap.encode()], dtype=np.int32))
            self._runner.swap(swap)

    def _tell_others(self, channel: Channel, kind: int, parts: Sequence[Part]) -> None:
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
    """A collective, a pipe or a connection fails the moment a rank dies. The watcher knows which
    one, says so, and ends this process."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, Broken):
        time.sleep(VERDICT_SECONDS)
        raise


def check_devices(options: RunnerOptions, ranks: int) -> None:
    if options.device != "cuda":
        return
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.devices is not None:
        missing = [device for device in options.devices if device >= visible]
        if missing:
            raise ConfigError(
                f"--devices: there is no GPU {missing[0]}, {visible} CUDA devices are visible"
            )
    elif visible < ranks:
        raise ConfigError(
            f"--device cuda with {ranks} ranks on this node: {visible} CUDA devices are visible"
        )


def configure_threads(options: RunnerOptions, ranks: int) -> None:
    """One core is left to the front process, the others are dealt out to the ranks of the node."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(options.threads or max(1, (cores - 1) // ranks))
    if options.device == "cpu" and options.dtype == "float32":
        # oneDNN reorders a weight at every call; plain BLAS does not (measured: 2 to 3 times
        # faster for 16 to 64 rows on Arm, the same on x86, where fp32 goes to BLAS anyway).
        torch.backends.mkldnn.set_flags(False)


def _on_one_node(start: RankStart) -> tuple[Channel, RankGroup]:
    store = loopback_store()
    others = start.place.size - 1
    channel = StepChannel(step_capacity(start.options), others)
    _watch(start_ranks(start, channel.readers, [store.port] * others))
    return channel, join_group(0, start.place, store, start.options)


def _on_several_nodes(cluster: ClusterOptions) -> Callable[[RankStart], tuple[Channel, RankGroup]]:
    def begin(start: RankStart) -> tuple[Channel, RankGroup]:
        leader = Leader(cluster, start)
        start = leader.gather()
        others = start.place.here - 1
        channel = StepChannel(step_capacity(start.options), others)
        if others:
            stores = [leader.store_link() for _ in range(others)]
            _watch(start_ranks(start, channel.readers, stores), leader.tell_failure)
        group = join_group(0, start.place, leader.store, start.options)
        return NodesChannel(leader, channel), group

    return begin


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


def join_group(rank: int, place: Place, store: Any, options: RunnerOptions) -> RankGroup:
    local_rank = rank - place.first
    device = rank_device(options.device, local_rank, options.devices)
    through_host = options.shares_gpus and not _nccl_shares_gpus()
    if options.device == "cuda":
        torch.cuda.set_device(device)
    if options.device == "cuda" and not through_host:
        backend = "nccl"
        if place.host is not None:  # "=" asks for this very name, not for names that begin so
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(place.host)}")
    elif place.host is not None:
        backend = _gloo_at(place.host)
    else:
        backend = "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=place.size)
    kind = GroupThroughHost if through_host else RankGroup
    return kind(rank, place.size, device, local_rank, place.here)


def _nccl_shares_gpus() -> bool:
    """Whether it lets several ranks use one GPU, if it is asked to."""
    version = torch.cuda.nccl.version()
    if version >= NCCL_SHARES_GPUS:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        return True
    log.warning(
        "--devices names a GPU twice, which NCCL %s does not allow: sums go through the host's "
        "memory and steps are launched kernel by kernel, which is slow",
        ".".join(map(str, version)),
    )
    return False


def _gloo_at(host: str) -> str:
    """The name of a backend that listens at this address alone; gloo's own takes an interface."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # the stubs do not know its options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timeout
        return gloo(store, rank, size, options)

    dist.Backend.register_backend(GLOO_AT_ADDRESS, create, devices=["cpu"])
    return GLOO_AT_ADDRESS


def rank_main(rank: int, start: RankStart, steps: StepReader, link: StoreLink) -> None:
    setup_logging(start.role, start.log_level, rank, start.log_format)
    exit_with_parent()
    with uncaught_logged():
        _serve_rank(rank, start, steps, link)


def _serve_rank(rank: int, start: RankStart, steps: StepReader, link: StoreLink) -> None:
    place = start.place
    check_devices(start.options, place.here)
    configure_threads(start.options, place.here)
    store = NodeStore(link) if not isinstance(link, int) else _dial_store(link)
    with leaving_the_verdict():
        group = join_group(rank, place, store, start.options)
        runner = ModelRunner(start.config, start.options, group)
        log.info("ready")
        if isinstance(store, NodeStore):
            store.tell_ready()
        _follow(runner, steps)


def _dial_store(port: int) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, port, is_master=False)


def _follow(runner: ModelRunner, steps: StepReader) -> None:
    while True:
        kind, *_ = values = steps.receive()
        if kind == SWAP:
            runner.swap(Swap.decode(values[1:].tolist()))
            continue
        if kind == ALLOCATE:
            runner.host_copies.allocate(int(values[1]))
            continue
        parts = decode_parts(values[1:])
        if kind == STEP:
            runner.step(parts, [None] * sum(part.num_logits for part in parts)).result()
        else:
            runner.forward(parts)


def _tell_nobody(reason: str) -> None:
    pass


def _watch(ranks: list[BaseProcess], tell: Callable[[str], None] = _tell_nobody) -> None:
    threading.Thread(target=_watch_ranks, args=(ranks, tell), daemon=True).start()


def _watch_ranks(ranks: list[BaseProcess], tell: Callable[[str], None]) -> None:
    reason = first_death(ranks)
    log.critical("%s; the engine stops", reason)
    tell(reason)
    end_process(EXIT_RANK_DIED)


def first_death(ranks: list[BaseProcess]) -> str:
    """Waits until a rank dies, and says which."""
    ended = connection.wait([rank.sentinel for rank in ranks])
    dead = next(rank for rank in ranks if rank.sentinel in ended)
    dead.join()
    return f"{dead.name} died with exit code {dead.exitcode}"
