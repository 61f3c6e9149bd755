"""Tensor-parallel ranks: rank 0 lives in the engine process and decides; the others follow.

A forward travels as raw integers: through shared memory on a node, on a connection to other nodes
(``cluster/``). A rank that dies takes the whole engine down, with its reason in the log: a
collective that misses one of its members would wait for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ssd_engine.checkpoints.model_config import ModelConfig
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.forward.batch import Draw, Part, encode_parts
from ssd_engine.forward.result import ForwardResult, PendingForward, Score
from ssd_engine.kvcache.swap import Swap
from ssd_engine.models.features import check_boundaries
from ssd_engine.models.tensor_parallel import RankGroup, SingleRank
from ssd_engine.parallel.cluster.options import ClusterOptions
from ssd_engine.parallel.nodes.leader import Leader
from ssd_engine.parallel.ranks.failures import await_failure_report, watch_ranks
from ssd_engine.parallel.ranks.group import (
    check_devices,
    configure_threads,
    join_group,
    loopback_store,
)
from ssd_engine.parallel.ranks.rank_main import ALLOCATE, FORWARD, PREPARE, STEP, SWAP, WATCH
from ssd_engine.parallel.ranks.rank_processes import start_ranks
from ssd_engine.parallel.ranks.rank_start import RANK_MODULE, RankPlacement, RankStart
from ssd_engine.parallel.ranks.step_channel import StepChannel, step_capacity
from ssd_engine.process.fork_server import ForkServer
from ssd_engine.self_check.check import load_checked


def _nothing() -> None:
    pass


class Channel(Protocol):
    """The channel to all other ranks."""

    def send(self, values: NDArray[np.int32]) -> None: ...


class NodesChannel:
    """Sends to the ranks of other nodes, which take longer to reach, then to those of this one."""

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
        forks: ForkServer | None = None,
    ) -> None:
        """``cluster``: the nodes that share the ranks; None: all are on this one. ``forks`` forks
        the ranks; None: one that starts with them does."""
        here = tp_size if cluster is None else tp_size // cluster.nodes
        check_devices(options, here)
        configure_threads(options, here)
        self._channel: Channel | None = None
        if tp_size == 1:
            self._runner = load_checked(config, options, SingleRank())
            return
        start = RankStart(
            config, options, RankPlacement(tp_size, 0, here), role, log_level, log_format
        )
        begin = _on_one_node if cluster is None else partial(_on_several_nodes, cluster)
        self._forks = forks or ForkServer([RANK_MODULE])  # which ends with who holds it
        with await_failure_report():
            self._channel, group = begin(start, self._forks)
            self._runner = load_checked(config, options, group)

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

    @property
    def features(self) -> Tensor | None:
        """What rows of the last forward told, where they are watched: all ranks have it whole."""
        return self._runner.features

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        """One more graph that a watch of these needs is captured, on all ranks. True: all are."""
        check_boundaries(boundaries, self._runner.config.num_layers)
        with self._on_all_ranks(PREPARE, lambda: np.array(boundaries, dtype=np.int32)):
            return self._runner.prepare_watch(boundaries)

    def watch(self, boundaries: Sequence[int]) -> None:
        """From now on forwards and steps tell the residual stream at these boundaries; ranks
        capture their steps together. It may change between any two steps."""
        check_boundaries(boundaries, self._runner.config.num_layers)
        with self._on_all_ranks(WATCH, lambda: np.array(boundaries, dtype=np.int32)):
            self._runner.watch(boundaries)

    def beside_forwards(self) -> AbstractContextManager[object]:
        """What is done inside does not wait for what was launched last."""
        return self._runner.beside_forwards()

    def forward(
        self,
        parts: Sequence[Part],
        launched: Callable[[], None] = _nothing,
        score: Score | None = None,
    ) -> Tensor | None:
        """Logits of the wanted rows, or None when none are wanted.

        ``launched`` is called as soon as the device has its work, which on a CPU is at once.
        ``score`` gets the logits of scored rows.
        """
        with self._on_all_ranks(FORWARD, partial(encode_parts, parts)):
            return self._runner.forward(parts, launched, score)

    def draw(self, logits: Tensor | None, draws: Sequence[Draw | None]) -> ForwardResult:
        """Draws from the logits of a forward, which the first rank has."""
        return self._runner.draw(logits, draws)

    def step(
        self,
        parts: Sequence[Part],
        draws: Sequence[Draw | None],
        launched: Callable[[], None] = _nothing,
    ) -> PendingForward:
        """A forward over few rows of each sequence, which may be computed meanwhile.

        ``draws``: of every row that asks for logits; None where its token is not drawn there.
        """
        with self._on_all_ranks(STEP, partial(encode_parts, parts)):
            pending = self._runner.step(parts, draws, launched)
        return pending if self._channel is None else PendingForwardOnRanks(pending)

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> PendingForward | None:
        """The step after one over trees alone; None: it is to be said in full. See ModelRunner."""
        return self._runner.deepen(flight, slots, widths) if self._channel is None else None

    @property
    def block_bytes(self) -> int:
        """The memory of a KV block, that of all ranks on this node together."""
        return self._runner.kv.spec.bytes_per_block * self._runner.tp.local_size

    def allocate_host_blocks(self, number: int) -> None:
        """Where KV is copied to by ``swap``, on every rank."""
        with self._on_all_ranks(ALLOCATE, lambda: [number]):
            self._runner.host_copies.allocate(number)

    def seconds_of_a_swap(self) -> float:
        """The time in which one block is copied out and in."""
        return self._runner.host_copies.seconds_of_a_block()

    def swap(self, swap: Swap) -> None:
        """Copies KV between device and host, in the order of forwards."""
        with self._on_all_ranks(SWAP, swap.encode):
            self._runner.swap(swap)

    @contextmanager
    def _on_all_ranks(self, kind: int, encode: Callable[[], ArrayLike]) -> Iterator[None]:
        """Tells the other ranks, where there are any, what this one is about to do."""
        if self._channel is None:
            yield
            return
        with await_failure_report(at_once=(torch.OutOfMemoryError,)):
            self._channel.send(np.concatenate(([np.int32(kind)], encode()), dtype=np.int32))
            yield


class PendingForwardOnRanks:
    """A step of several ranks, any of which may die until its result is there."""

    def __init__(self, pending: PendingForward) -> None:
        self._pending = pending
        self.rows = pending.rows

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> ForwardResult:
        with await_failure_report():
            return self._pending.result()


def _on_one_node(start: RankStart, forks: ForkServer) -> tuple[Channel, RankGroup]:
    store = loopback_store()
    others = start.place.size - 1
    channel = StepChannel(step_capacity(start.options), others)
    watch_ranks(start_ranks(forks, start, channel.readers, [store.port] * others))
    return channel, join_group(0, start.place, store, start.options)


def _on_several_nodes(
    cluster: ClusterOptions, start: RankStart, forks: ForkServer
) -> tuple[Channel, RankGroup]:
    leader = Leader(cluster, start)
    start = leader.gather()
    others = start.place.here - 1
    channel = StepChannel(step_capacity(start.options), others)
    if others:
        stores = [leader.store_link() for _ in range(others)]
        watch_ranks(start_ranks(forks, start, channel.readers, stores), leader.tell_failure)
    return NodesChannel(leader, channel), join_group(0, start.place, leader.store, start.options)
