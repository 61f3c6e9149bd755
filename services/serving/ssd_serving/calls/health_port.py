"""A port for probes, on which nobody can keep others out.

gRPC closes whoever comes when a port has its number of connections, and cannot say which of them
should go instead. So connections are taken here, and handed on to a socket inside this host where
gRPC listens. When there is no room, the oldest one of the host that has most makes room: a probe
connects, asks and leaves, so that only those who want nothing are old.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket

from ssd_engine.process.addresses import join_address, split_address
from ssd_engine.process.unknown_connections import UnknownConnections
from ssd_serving.rpc.connections import HANDSHAKE_SECONDS, most_probes
from ssd_serving.supervisor import Supervisor

log = logging.getLogger(__name__)

BACKLOG = 512  # connections that are not accepted yet
LEAVING = 16  # connections that made room, and have not ended yet
PAUSE_SECONDS = 0.1  # where no connection could be accepted
CHUNK = 1 << 14
NAME = "ssd-health"
SCHEME = "unix-abstract:"


class HealthPort:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        name = f"{NAME}-{secrets.token_hex(8)}"
        self.inside = SCHEME + name  # where gRPC is to listen
        self._inside = f"\0{name}"
        self._held = UnknownConnections(most_probes())
        self._spare = asyncio.Semaphore(most_probes() + LEAVING)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None

    def bind(self, address: str) -> int:
        """Returns the port; raises OSError where there is none to have."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        self._socket.setblocking(False)
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        listener = self._socket
        if listener is None:
            raise RuntimeError("a port is bound before it is started")
        self._keep(self._supervisor.start("health_port", lambda: self._accept(listener)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            self._socket.close()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._spare.acquire()
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.debug("no probe was accepted: %s", error)
                self._spare.release()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._held.enter(address[0], connection)
            self._keep(asyncio.create_task(self._serve(connection, *address[:2])))

    async def _serve(self, connection: socket.socket, host: str, port: int) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                first = await asyncio.get_running_loop().sock_recv(connection, CHUNK)
            if first:
                await self._hand_on(first, connection, join_address(host, port))
        except (OSError, TimeoutError) as error:
            log.debug("a probe from %s ended: %s", join_address(host, port), error)
        finally:
            self._held.leave(host, connection)
            connection.close()
            self._spare.release()

    async def _hand_on(self, first: bytes, connection: socket.socket, address: str) -> None:
        with socket.socket(socket.AF_UNIX) as inside:
            inside.setblocking(False)
            kind = "ipv6" if address.startswith("[") else "ipv4"
            inside.bind(f"{self._inside}/{next(self._numbers)}/{kind}:{address}")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(inside, self._inside)
            await loop.sock_sendall(inside, first)
            pumps = [
                asyncio.ensure_future(_pump(connection, inside)),
                asyncio.ensure_future(_pump(inside, connection)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.wait(pumps)


def caller_of(peer: str) -> str:
    """Who gRPC says the other side is, or whom a probe's connection was handed on for."""
    if peer.startswith(f"{SCHEME}{NAME}-"):
        return peer.split("/", 2)[-1]
    return peer


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, CHUNK):
            await loop.sock_sendall(sink, data)
