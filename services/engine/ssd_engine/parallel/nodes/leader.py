"""The leader's side of a cluster: it lets nodes in, and watches them for as long as it lives.

Each connection has a thread of its own, so that no stranger holds up a node. A node that goes
before all are there is waited for again; after that it takes the whole cluster with it.
"""

import logging
import socket
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ssd_engine.errors import EXIT_NODE_LOST, ConfigError, SSDError
from ssd_engine.parallel.cluster.options import ClusterOptions
from ssd_engine.parallel.cluster.setup import Application, Setup, decode, encode
from ssd_engine.parallel.cluster.store import WAIT_SECONDS, serve_request
from ssd_engine.parallel.cluster.wire import (
    HANDSHAKE,
    HEADER,
    PARTING_SECONDS,
    READY,
    NodeConnection,
    NodeConnectionBroken,
    NodeFrameKind,
    as_reason,
)
from ssd_engine.parallel.ranks.rank_start import RankStart
from ssd_engine.process.fork_server import terminate_starter
from ssd_engine.process.log import end_process
from ssd_engine.process.secret_handshake import UnknownPeer
from ssd_engine.process.sparse_log import SparseLog
from ssd_engine.process.unknown_connections import UnknownConnections

log = logging.getLogger(__name__)

GREETING_SECONDS = 10.0  # that a stranger gets to prove that it is none
BACKLOG = 64
REMIND_SECONDS = 10.0
PINGS_PER_TIMEOUT = 4


class JoinTimeout(SSDError):
    """Not all nodes came."""


class NodeRefused(SSDError):
    """A node that may not join; the message is for both sides."""


class Leader:
    def __init__(self, options: ClusterOptions, start: RankStart) -> None:
        self._options = options
        self._start = start
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=WAIT_SECONDS))
        self._changed = threading.Condition()  # guards what follows
        self._claimed: set[int] = set()  # numbers of nodes that are joining, or have joined
        self._nodes: dict[int, NodeConnection] = {}
        self._all: list[NodeConnection] = []  # from the start on
        self._started = self._ending = False
        self._deadline = time.monotonic() + options.join_timeout
        self._listener = _listen(options.host, options.port)
        self._strangers, self._said = UnknownConnections(), SparseLog()
        for work in (self._accept, self._ping, self._await_farewell):
            threading.Thread(target=work, daemon=True).start()

    def gather(self) -> RankStart:
        """Wait until every node is there, and start them; returns what this node starts with."""
        log.info("cluster: listening on %s", _name(self._listener.getsockname()))
        with self._changed:
            while missing := self._missing():
                left = self._deadline - time.monotonic()
                if left <= 0:
                    break
                log.info("cluster: waiting for %s", _list(missing))
                self._changed.wait(min(left, REMIND_SECONDS))
            self._started = not missing
            self._all = [self._nodes[node] for node in sorted(self._nodes)]
        if missing:
            reason = (
                f"{_list(missing)} did not join within --join-timeout "
                f"{self._options.join_timeout:g} s"
            )
            self.tell_failure(reason)
            raise JoinTimeout(reason)
        for connection in self._all:
            connection.send(NodeFrameKind.START)
        log.info("cluster: all %d nodes are here", self._options.nodes)
        return replace(self._start, place=replace(self._start.place, host=self._all[0].local_host))

    def send_step(self, values: NDArray[np.int32]) -> None:
        data = values.astype("<i4", copy=False).tobytes()
        frame = HEADER.pack(NodeFrameKind.STEP, len(data)) + data
        deadline = time.monotonic() + self._options.timeout
        for connection in self._all:
            connection.write(frame, deadline)

    def store_link(self) -> Connection:
        """A pipe on which a rank of this node asks the store."""
        ours, theirs = Pipe()
        threading.Thread(target=self._serve_rank, args=(ours,), daemon=True).start()
        return theirs

    def tell_failure(self, reason: str) -> None:
        self._part(NodeFrameKind.FAILED, reason)

    # Threads, from here on.

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError as error:  # one that went before it was seen, or no file left for it
                self._said.warning("accept", f"cluster: {error}")
                time.sleep(0.1)
                continue
            self._strangers.enter(address[0], connected)
            threading.Thread(target=self._meet, args=(connected, address), daemon=True).start()

    def _meet(self, connected: socket.socket, address: tuple[Hashable, ...]) -> None:
        try:
            connection = NodeConnection(connected)
        except OSError as error:  # it has gone already
            self._said.warning("gone", f"cluster: {_name(address)}: {error}")
            self._strangers.leave(address[0], connected)
            connected.close()
            return
        try:
            if self._is_node(connection, address):
                self._strangers.leave(address[0], connected)
                self._judge(connection, address)
        except NodeRefused as refusal:
            log.warning("cluster: refused %s: %s", _name(address), refusal)
            connection.part(NodeFrameKind.REFUSED, str(refusal).encode())
        except NodeConnectionBroken as error:
            log.warning("cluster: refused %s: %s", _name(address), error)
        finally:
            self._strangers.leave(address[0], connected)
            connection.close()

    def _is_node(self, connection: NodeConnection, address: tuple[Hashable, ...]) -> bool:
        """Whether it knows the secret. Who does not could fill a log."""
        try:
            HANDSHAKE.admit(connection, self._options.secret, time.monotonic() + GREETING_SECONDS)
        except (UnknownPeer, NodeConnectionBroken) as error:
            kind = type(error).__name__  # whoever says it knows the secret is told apart
            self._said.warning(kind, f"cluster: refused {_name(address)}: {error}")
            return False
        return True

    def _judge(self, connection: NodeConnection, address: tuple[Hashable, ...]) -> None:
        soon = time.monotonic() + GREETING_SECONDS
        application = decode(Application, connection.expect(NodeFrameKind.APPLY, soon))
        node = application.node
        self._claim(application)
        try:
            connection.send(NodeFrameKind.SETUP, encode(self._setup()))
            # The node may have to fetch its model first.
            connection.expect(NodeFrameKind.FIT, time.monotonic() + self._options.join_timeout)
            self._admit(node, connection, address)
            self._follow(node, connection)
        finally:
            with self._changed:
                self._nodes.pop(node, None)
                self._claimed.discard(node)
                self._changed.notify_all()

    def _claim(self, application: Application) -> None:
        node, last = application.node, self._options.nodes - 1
        if application.software != self._options.software:
            raise NodeRefused(
                f"node {node} runs {application.software}, the leader {self._options.software}"
            )
        if not 1 <= node <= last:
            raise NodeRefused(f"--node {node}: must be in [1, {last}] for --nodes {last + 1}")
        with self._changed:
            if node in self._claimed:
                raise NodeRefused(f"--node {node}: this node is here already")
            self._claimed.add(node)

    def _setup(self) -> Setup:
        start, options = self._start, self._options
        return Setup(
            model=options.model,
            digest=options.digest,
            config=start.config,
            options=start.options,
            tp=start.place.size,
            nodes=options.nodes,
            role=start.role,
            log_level=start.log_level,
            timeout=options.timeout,
        )

    def _admit(self, node: int, connection: NodeConnection, address: tuple[Hashable, ...]) -> None:
        connection.send(NodeFrameKind.ADMITTED)
        log.info("cluster: node %d has joined from %s", node, _name(address))
        with self._changed:
            self._nodes[node] = connection
            self._changed.notify_all()

    def _follow(self, node: int, connection: NodeConnection) -> None:
        """Until the node is gone, or the cluster."""
        try:
            while True:
                kind, payload = connection.receive(time.monotonic() + self._options.timeout)
                self._handle(node, connection, kind, payload)
        except NodeConnectionBroken as error:
            with self._changed:
                started, ending = self._started, self._ending
            if ending:
                return
            if started:
                self._die(node, f"node {node}: {error}")
            log.warning("cluster: node %d has left: %s", node, error)

    def _handle(
        self, node: int, connection: NodeConnection, kind: NodeFrameKind, payload: bytes
    ) -> None:
        match kind:
            case NodeFrameKind.PING:
                return
            case NodeFrameKind.STORE:  # the first byte names the rank that asks
                connection.send(
                    NodeFrameKind.STORE, payload[:1] + serve_request(self.store, payload[1:])
                )
            case NodeFrameKind.LEAVING:
                log.warning("cluster: node %d was told to stop: the service drains", node)
                terminate_starter()
            case NodeFrameKind.FAILED:
                raise NodeConnectionBroken(as_reason(payload))
            case _:
                raise NodeConnectionBroken(f"{kind.name} came from a node")

    def _serve_rank(self, pipe: Connection) -> None:
        try:
            while True:
                request = pipe.recv_bytes()
                if request != READY:
                    pipe.send_bytes(serve_request(self.store, request))
        except (EOFError, OSError):
            return  # whoever watches the rank says so

    def _ping(self) -> None:
        while True:
            time.sleep(self._options.timeout / PINGS_PER_TIMEOUT)
            for connection in self._present():
                connection.ping()

    def _await_farewell(self) -> None:
        try:
            self._options.farewell.recv_bytes()
        except (EOFError, OSError):
            return  # the front is gone, and this process follows it
        self._part(NodeFrameKind.GOODBYE, "")
        end_process(0)

    def _die(self, node: int, reason: str) -> None:
        log.critical("%s; the engine stops", reason)
        with self._changed:
            self._nodes.pop(node)
        self.tell_failure(reason)
        end_process(EXIT_NODE_LOST)

    def _part(self, kind: NodeFrameKind, reason: str) -> None:
        """Tell every node that this is the end, and wait until they have heard it."""
        with self._changed:
            self._ending = True
        for connection in self._present():
            connection.last_word(kind, reason.encode())
        with self._changed:
            self._changed.wait_for(lambda: not self._nodes, PARTING_SECONDS)

    def _present(self) -> list[NodeConnection]:
        with self._changed:
            return list(self._nodes.values())

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._options.nodes) if node not in self._nodes]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--cluster-listen: cannot bind {host}:{port}: {error.strerror or error}"
        ) from None
    return listener


def _name(address: tuple[Hashable, ...]) -> str:
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _list(nodes: list[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))
