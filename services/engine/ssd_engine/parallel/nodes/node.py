"""A node at work: one loop between the leader and the ranks that are here.

It waits on everything at once and never for one of them: steps of the leader go to the ranks,
their requests to the store go to the leader, and whoever dies ends it.
"""

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_engine.errors import SSDError
from ssd_engine.parallel.cluster.wire import (
    READY,
    SMALL_FRAME,
    NodeConnectionBroken,
    NodeFrameKind,
    as_reason,
)
from ssd_engine.parallel.nodes.member import Membership
from ssd_engine.parallel.ranks.rank_processes import start_ranks
from ssd_engine.parallel.ranks.step_channel import StepChannel, step_capacity
from ssd_engine.process.fork_server import ForkedProcess, ForkServer

log = logging.getLogger(__name__)

PINGS_PER_TIMEOUT = 4
INTEGER_BYTES = 4
MAX_AHEAD = 1024  # steps; rank 0 computes them all and cannot be far ahead


class LeaderLost(SSDError):
    pass


class RankDied(SSDError):
    pass


class ClusterFailed(SSDError):
    """The leader says that the cluster ends, and why."""


class Node:
    """Serves from ``run`` on; use from the main thread."""

    def __init__(
        self,
        membership: Membership,
        forks: ForkServer,
        ready: Callable[[], None],
        leaving: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ready`` is called when every rank of this node has its weights, ``leaving`` when a
        signal asks for the end."""
        self._forks = forks
        self._connection = membership.connection
        self._start = membership.start
        self._timeout = membership.timeout
        self._tell_ready = ready
        self._tell_leaving = leaving
        capacity = step_capacity(self._start.options)
        self._max_step = INTEGER_BYTES * capacity
        self._connection.max_frame = max(SMALL_FRAME, self._max_step)
        self._channel = StepChannel(capacity, self._start.place.here)
        self._steps: deque[NDArray[np.int32]] = deque()
        self._ranks: list[ForkedProcess] = []
        self._stores: list[Connection] = []
        self._num_ready = self._num_signals = 0
        self._over = False
        self._clock = clock
        self._heard = self._pinged = clock()
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._ringer, False)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the leader says goodbye; raises SSDError for any other end."""
        self._watch(self._connection, self._hear_leader)
        self._watch(self._bell, self._hear_signal)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os.write(self._ringer, b"\0"))
        try:
            while not self._over:
                for key, _ in self._selector.select(self._timeout / PINGS_PER_TIMEOUT):
                    key.data()
                self._keep_alive()
        except NodeConnectionBroken as error:
            raise LeaderLost(f"the leader is lost: {error}") from None
        except RankDied as death:
            self._connection.part(NodeFrameKind.FAILED, str(death).encode())
            raise
        finally:
            for rank in self._ranks:
                rank.kill()
            self._connection.close()

    def _watch(self, file: Any, work: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, work)

    def _keep_alive(self) -> None:
        now = self._clock()
        if now - self._heard > self._timeout:
            raise LeaderLost(f"the leader is lost: nothing was heard for {self._timeout:g} s")
        if now - self._pinged > self._timeout / PINGS_PER_TIMEOUT:
            self._connection.ping()
            self._pinged = now

    def _hear_leader(self) -> None:
        frames = self._connection.pending()
        self._heard = self._clock()
        for kind, payload in frames:
            self._handle(kind, payload)

    def _handle(self, kind: NodeFrameKind, payload: bytes) -> None:
        match kind:
            case NodeFrameKind.STEP if self._is_step(payload):
                self._steps.append(np.frombuffer(payload, dtype="<i4"))
                self._pass_on()
            case NodeFrameKind.PING:
                return
            case NodeFrameKind.STORE if payload and payload[0] < len(self._stores):
                self._stores[payload[0]].send_bytes(payload[1:])
            case NodeFrameKind.START if not self._ranks:
                self._start_ranks()
            case NodeFrameKind.FAILED:
                raise ClusterFailed(f"the cluster ends: {as_reason(payload)}")
            case NodeFrameKind.GOODBYE:
                log.info("the leader has ended, and so does this node")
                self._over = True
            case _:
                raise LeaderLost(f"the leader says what makes no sense: {kind.name}")

    def _is_step(self, payload: bytes) -> bool:
        whole = len(payload) % INTEGER_BYTES == 0 and len(payload) <= self._max_step
        return whole and bool(self._ranks) and len(self._steps) < MAX_AHEAD

    def _pass_on(self) -> None:
        if self._steps and self._channel.free:
            self._channel.send(self._steps.popleft())

    def _start_ranks(self) -> None:
        pairs = [Pipe() for _ in self._start.place.ranks]
        self._stores = [ours for ours, _ in pairs]
        self._ranks = start_ranks(
            self._forks, self._start, self._channel.readers, [theirs for _, theirs in pairs]
        )
        for _, theirs in pairs:
            theirs.close()
        for rank in self._ranks:
            self._watch(rank.sentinel, partial(self._bury, rank))
        for pipe in self._channel.pipes:
            self._watch(pipe, partial(self._hear_reader, pipe))
        for number, store in enumerate(self._stores):
            self._watch(store, partial(self._hear_rank, number))

    def _hear_reader(self, pipe: Connection) -> None:
        self._channel.hear(pipe)
        self._pass_on()

    def _hear_rank(self, number: int) -> None:
        store = self._stores[number]
        try:
            request = store.recv_bytes()
        except (EOFError, OSError):
            self._selector.unregister(store)  # its rank dies, as another watch tells
            return
        if request != READY:
            self._connection.send(NodeFrameKind.STORE, bytes([number]) + request, self._timeout)
            return
        self._num_ready += 1
        if self._num_ready == len(self._ranks):
            log.info("ready: %d ranks", len(self._ranks))
            self._tell_ready()

    def _hear_signal(self) -> None:
        """The cluster drains as a whole; a second signal does not wait for that."""
        os.read(self._bell, 16)
        self._num_signals += 1
        self._tell_leaving()
        if self._num_signals > 1:
            raise ClusterFailed("told to stop twice: this node does not wait for the leader")
        log.info("told to stop: the leader is asked to drain")
        self._connection.send(NodeFrameKind.LEAVING, seconds=self._timeout)

    def _bury(self, rank: ForkedProcess) -> None:
        rank.join()
        raise RankDied(f"{rank.name} died with exit code {rank.exitcode}")
