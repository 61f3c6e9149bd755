"""The tensor plane of a link: rows of one stream on their way from one engine to the other.

One direction, two processes, any of which may die at any moment. The engine loops hand rows over
and ask for them; they never wait for the plane itself. A plane that fails is broken for good, and
the link makes another at its next epoch. Whichever way its rows go, the draft waits and the target
dials:

    draft     plane, answer = await_target(choose_kind(offer, ours), epoch, stream, …)
    target    plane = go_to_draft(answer, epoch, stream, …)

    sender    sender = Sender(plane)
              sender.send(key, rows)
    receiver  receiver = Receiver(plane)
              receiver.expect(key, n)            before the rows are sent
              receiver.receive(key, n, timeout)  when they are needed
    or        inbox = RowsInbox(plane)
              inbox.take()                       whatever has come
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ssd_engine.process.nccl_library import share_gpus
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind, PlaneOffer, host_id
from ssd_engine.tensor_plane.protocol.streams import RowsDirection, RowsStream
from ssd_engine.tensor_plane.transports.address import dialled, listen
from ssd_engine.tensor_plane.transports.carriers import Meeting, RowsIn, RowsOut
from ssd_engine.tensor_plane.transports.connection import Connection, Wake
from ssd_engine.tensor_plane.transports.greeting import PlaneTerms, admit, enter
from ssd_engine.tensor_plane.transports.process_group import (
    ProcessGroupIn,
    ProcessGroupOut,
    leave_nccl_errors_to_us,
    make_nccl,
)
from ssd_engine.tensor_plane.transports.shared_memory import SharedMemoryIn, SharedMemoryOut
from ssd_engine.tensor_plane.transports.staging import Staging, device_id, make_staging
from ssd_engine.tensor_plane.transports.tcp import TcpIn, TcpOut

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
SECRET_BYTES = 32

CARRIERS: dict[PlaneKind, tuple[Callable[[Meeting], RowsOut], Callable[[Meeting], RowsIn]]] = {
    PlaneKind.SHARED_MEMORY: (SharedMemoryOut, SharedMemoryIn),
    PlaneKind.TCP: (TcpOut, TcpIn),
    PlaneKind.NCCL: (
        lambda meeting: ProcessGroupOut(meeting, make_nccl),
        lambda meeting: ProcessGroupIn(meeting, make_nccl),
    ),
}


def local_offer(
    device: torch.device, *streams: RowsStream, allowed: Sequence[PlaneKind] = tuple(PlaneKind)
) -> PlaneOffer:
    """What this process can do, with its rows on this device. ``allowed``: by the operator."""
    host = host_id()
    able = {
        PlaneKind.SHARED_MEMORY: bool(host),
        PlaneKind.TCP: True,
        PlaneKind.NCCL: device.type == "cuda" and dist.is_nccl_available(),
    }
    kinds = tuple(kind for kind in able if able[kind] and kind in allowed)
    return PlaneOffer(kinds, host, device_id(device), streams, _shares_gpu(kinds))


def _shares_gpu(kinds: Sequence[PlaneKind]) -> bool:
    """Whether NCCL may join this process to another one on its GPU: asked where nothing else is
    allowed, which is for debugging."""
    if tuple(kinds) != (PlaneKind.NCCL,):
        return False
    missing = share_gpus()
    if missing is not None:
        log.info("planes of NCCL join two GPUs, not two processes on one: %s", missing)
    return missing is None


@dataclass(frozen=True)
class AgreedPlane:
    """A plane that both sides have agreed on, and that one of them is about to make its end of."""

    terms: PlaneTerms
    outward: RowsDirection  # the direction of rows that this side sends
    connect: Callable[[Wake], Connection]
    staging: Staging
    deadline: float  # for being up

    def meet(self, wake: Wake, resources: ExitStack) -> Meeting:
        connection = self.connect(wake)
        resources.callback(connection.close)
        return Meeting(connection, wake, self.terms, self.staging, self.deadline)


def await_target(
    kind: PlaneKind,
    epoch: int,
    stream: RowsStream,
    *,
    bind_host: str,
    device: torch.device,
    ports: range | None = None,
    connect_timeout_s: float = CONNECT_SECONDS,
) -> tuple[AgreedPlane, PlaneAnswer]:
    """The draft's side, which listens from now on, and the answer that brings the target here.

    ``ports``: where to listen, for a kind that listens on a port; None: on any that is free.
    """
    _prepare(kind, stream, device)
    terms, staging = PlaneTerms(kind, epoch, stream), make_staging(device)
    secret = secrets.token_bytes(SECRET_BYTES)
    deadline = time.monotonic() + connect_timeout_s
    listener, address = listen(kind, bind_host, ports)

    def connect(wake: Wake) -> Connection:
        with listener:
            return admit(listener, wake, terms, secret, deadline)

    plane = AgreedPlane(terms, RowsDirection.TO_TARGET, connect, staging, deadline)
    return plane, PlaneAnswer(kind, address, secret, stream)


def go_to_draft(
    answer: PlaneAnswer,
    epoch: int,
    stream: RowsStream,
    *,
    device: torch.device,
    dial_host: str | None = None,
    connect_timeout_s: float = CONNECT_SECONDS,
) -> AgreedPlane:
    """The target's side.

    With ``dial_host`` only the port of the answer's address is used: the draft cannot send the
    target to a host that its operator did not name, and may listen on every interface.
    """
    kind = answer.kind
    _prepare(kind, stream, device)
    terms, staging = PlaneTerms(kind, epoch, stream), make_staging(device)
    deadline = time.monotonic() + connect_timeout_s

    def connect(wake: Wake) -> Connection:
        return enter(dialled(kind, answer.address, dial_host), wake, terms, answer.secret, deadline)

    return AgreedPlane(terms, RowsDirection.TO_DRAFT, connect, staging, deadline)


def _prepare(kind: PlaneKind, stream: RowsStream, device: torch.device) -> None:
    stream.check()
    if kind is PlaneKind.NCCL:
        if device.type != "cuda":
            raise ValueError("an NCCL plane joins CUDA devices")
        leave_nccl_errors_to_us()
