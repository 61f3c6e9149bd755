"""Room for newcomers at a port whose connections have a number.

gRPC closes whoever comes when a port has that number, and cannot say which should go instead. So
before it is reached, connections on which nothing has moved for a while are shut down: the idlest
of the host that has most, until there is room. gRPC sees the end of a connection that its peer has
closed. Which they are, the system knows: they are found among the descriptors of this process.
"""

import asyncio
import contextlib
import heapq
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_engine.process.sparse_log import SparseLog
from ssd_serving.files.descriptors import read_surely

log = logging.getLogger(__name__)

DESCRIPTORS = Path("/proc/self/fd")
LOOK_SECONDS = 0.25
IDLE_SECONDS = 1.0  # without a byte either way; who has just come is left time to say hello
# Parts of what a port holds: room is made at the first, down to the second.
CROWDED, ROOMY = 7 / 8, 3 / 4
# struct tcp_info: milliseconds since data was last sent, and received.
TCP_INFO_BYTES, LAST_SENT, LAST_RECEIVED = 104, 44, 52


@dataclass(frozen=True)
class HeldConnection:
    descriptor: int
    peer: tuple[Any, ...]  # host, port and whatever else the system says of it
    idle: float  # seconds


class ConnectionRoom:
    def __init__(self, port: int, most: int, on_closed: Callable[[int], None]) -> None:
        """``on_closed``: gets how many connections have made room."""
        self._port, self._most, self._on_closed = port, most, on_closed
        self._sparse = SparseLog()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.make_room)
            except OSError as error:
                self._sparse.warning("look", f"connections cannot be looked at: {error}")

    def make_room(self) -> None:
        crowded = CROWDED * self._most
        if len(numbers := _descriptors()) < crowded:  # of whatever kind
            return
        held = [each for number in numbers if (each := self._look_at(number)) is not None]
        if len(held) < crowded:
            return
        goes = to_close(held, int(len(held) - ROOMY * self._most))
        self._say(
            Counter(each.peer[0].removeprefix("::ffff:") for each in goes if _shut_down(each))
        )

    def _look_at(self, number: int) -> HeldConnection | None:
        with contextlib.suppress(OSError), _copy_of(number) as found:
            of_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if of_internet and found.getsockname()[1] == self._port:
                return HeldConnection(number, found.getpeername(), _idle_seconds(found))
        return None

    def _say(self, closed: Counter[str]) -> None:
        for host, number in closed.items():
            self._on_closed(number)
            self._sparse.warning(
                "room",
                f"{number} idle connections of {host} made room for others: the port holds "
                f"{self._most}",
                host,
            )


def to_close(held: list[HeldConnection], number: int) -> list[HeldConnection]:
    """At most so many, each the idlest of the host that has most when it goes."""
    of_host: dict[str, list[HeldConnection]] = {}
    for each in sorted(held, key=lambda each: each.idle):
        of_host.setdefault(each.peer[0], []).append(each)
    fullest = [(-len(connections), host) for host, connections in of_host.items()]
    heapq.heapify(fullest)
    goes: list[HeldConnection] = []
    while fullest and len(goes) < number:
        _, host = heapq.heappop(fullest)
        idlest = of_host[host].pop()
        if idlest.idle >= IDLE_SECONDS:
            goes.append(idlest)
            if of_host[host]:
                heapq.heappush(fullest, (-len(of_host[host]), host))
    return goes


def _descriptors() -> list[int]:
    return [int(name) for name in read_surely(lambda: os.listdir(DESCRIPTORS))]


def _copy_of(number: int) -> socket.socket:
    """gRPC may close its own meanwhile, and the number be that of something else. Raises OSError
    for what is no socket."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _shut_down(connection: HeldConnection) -> bool:
    with contextlib.suppress(OSError), _copy_of(connection.descriptor) as found:
        if found.getpeername() == connection.peer:
            found.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _idle_seconds(connection: socket.socket) -> float:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    sent, received = (
        struct.unpack_from("I", info, place)[0] for place in (LAST_SENT, LAST_RECEIVED)
    )
    return min(sent, received) / 1000
