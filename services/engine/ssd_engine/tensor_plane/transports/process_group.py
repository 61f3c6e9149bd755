"""Rows through a two-rank process group of torch.distributed, without a default group.

A receive that was posted cannot be taken back: a kernel of NCCL spins until its peer comes. So
nothing is posted on expectation. The sender announces a send on the plane's connection in the
moment it posts it, and only then the receiver posts the receive, for exactly that size, in the
order of the announcements; those that have come together it posts together. Lateness and drops
leave nothing posted; a peer that announces and does not send stalls the plane's thread for
STALL_SECONDS, then breaks the plane, and never the engine's loop.

NCCL's protocol trusts its peer. It is for drafts that the operator trusts, which is what rejection
verification asks for anyway; shared memory and TCP need no such trust.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ssd_engine.tensor_plane.protocol.records import WINDOW, Announcement
from ssd_engine.tensor_plane.protocol.rows import empty_rows
from ssd_engine.tensor_plane.protocol.state import PlaneBroken
from ssd_engine.tensor_plane.transports.carriers import Meeting
from ssd_engine.tensor_plane.transports.connection import STALL_SECONDS, PlaneThreadStopped
from ssd_engine.tensor_plane.transports.pair_store import PairStore

SENDER, RECEIVER = 0, 1
POLL_SECONDS = 100e-6
_FOREVER = timedelta(days=10_000)


class Group(Protocol):
    """A communicator of two, seen from one of them. Tensors are flat, of bytes, on its device."""

    def send(self, data: Tensor) -> object:
        """Post a send; what it returns is kept until the peer has the data."""

    def receive(self, data: Sequence[Tensor]) -> None:
        """What the peer sends next, in this order: until all is complete, STALL_SECONDS at most."""

    def abort(self) -> None: ...


MakeGroup = Callable[[Meeting, dist.Store, int], Group]


class NcclGroup:
    """A group of NCCL. One rank alone (``size`` 1) has no peer: enough to try the library."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        device: torch.device,
        stopped: Callable[[], bool],
        size: int = 2,
    ) -> None:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _FOREVER  # waits are timed here; its own watchdog would end the process
        torch.cuda.set_device(device)
        self._peer = 1 - rank
        self._stopped = stopped
        self._group = nccl(store, rank, size, options)
        try:
            self._group.eager_connect_single_device(device)
        except BaseException:
            self.abort()
            raise

    def send(self, data: Tensor) -> object:
        with self._together() as works:
            self._group.send([data], self._peer, 0)
        return works, data

    def receive(self, data: Sequence[Tensor]) -> None:
        with self._together() as works:
            for each in data:
                self._group.recv([each], self._peer, 0)
        for work in works:
            work.wait()  # the stream waits, not this thread
        # A work that failed counts as completed; an event passes only when the rows are there.
        landed = torch.cuda.Event()
        landed.record()
        deadline = time.monotonic() + STALL_SECONDS
        while not landed.query():
            if self._stopped():
                raise PlaneThreadStopped
            if time.monotonic() > deadline:
                raise PlaneBroken("rows were announced and did not come")
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _together(self) -> Iterator[list[Any]]:
        """What is posted inside is one operation of the library, whose work is left in the list.
        Outside of this each send and receive is ordered among all others of the communicator."""
        works: list[Any] = []
        self._group._start_coalescing()
        try:
            yield works
        finally:
            works.append(self._group._end_coalescing())

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()  # ends a kernel that waits for the peer
            self._group = None


class ProcessGroupOut:
    def __init__(self, meeting: Meeting, make: MakeGroup) -> None:
        self._connection = meeting.connection
        self._staging = meeting.staging
        self._store = PairStore(meeting.connection, meeting.deadline)
        self._group = _join(meeting, self._store, make, SENDER)
        self._on_their_way: dict[int, object] = {}

    def push(self, announcement: Announcement, rows: Tensor) -> None:
        data = _as_bytes(rows.contiguous().to(self._staging.device))
        self._connection.write(announcement.encode())
        self._on_their_way[announcement.serial] = self._group.send(data)

    def release(self, serial: int) -> None:
        del self._on_their_way[serial]

    def close(self) -> None:
        self._group.abort()
        self._on_their_way.clear()


class ProcessGroupIn:
    """Receives for all sends that were announced are posted together."""

    at_once = WINDOW

    def __init__(self, meeting: Meeting, make: MakeGroup) -> None:
        self._stream = meeting.terms.stream
        self._staging = meeting.staging
        self._store = PairStore(meeting.connection, meeting.deadline)
        self._group = _join(meeting, self._store, make, RECEIVER)
        self._fetched: dict[int, Tensor] = {}

    def fetch(self, announcements: Sequence[Announcement]) -> None:
        """Wanted or not: a posted send must be met."""
        device = self._staging.device
        with self._staging.after(None):
            landing = [empty_rows(self._stream, each.num_rows, device) for each in announcements]
            self._group.receive([_as_bytes(rows) for rows in landing])
        self._fetched = {a.serial: rows for a, rows in zip(announcements, landing, strict=True)}

    def take(self, announcement: Announcement) -> Tensor:
        return self._fetched.pop(announcement.serial)

    def skip(self, announcement: Announcement) -> None:
        del self._fetched[announcement.serial]

    def close(self) -> None:
        self._group.abort()


def make_nccl(meeting: Meeting, store: dist.Store, rank: int) -> Group:
    wake = meeting.wake
    return NcclGroup(store, rank, meeting.staging.device, lambda: wake.stopped)


def _join(meeting: Meeting, store: PairStore, make: MakeGroup, rank: int) -> Group:
    """A group over which a first byte has gone: what is made on first use is made now."""
    group = make(meeting, dist.PrefixStore(f"ssd-plane/{meeting.terms.epoch}", store), rank)
    try:
        with meeting.staging.after(None):
            first = torch.zeros(1, dtype=torch.uint8, device=meeting.staging.device)
            if rank == SENDER:
                sent = group.send(first)
                store.seal()  # the receiver seals when it has the byte
                del sent
            else:
                group.receive([first])
                store.seal()
    except BaseException:
        group.abort()
        raise
    return group


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def leave_nccl_errors_to_us() -> None:
    """Groups made from here on do not end the process when their peer dies.

    The library reads this from the environment alone, when a group is made. The group of the
    tensor-parallel ranks is made before any link, and keeps its own way.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
