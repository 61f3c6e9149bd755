"""The tensor plane of a link: the draft's distributions on their way to the target.

One direction, two processes, any of which may die at any moment. The engine loops hand rows over
and ask for them; they never wait for the plane itself. A plane that fails is broken for good, and
the link makes another at its next epoch.

    draft    sender, answer = open_sender(choose_kind(offer, ours), epoch, …)
             sender.send(key, rows)             after a Launch
    target   receiver = open_receiver(answer, epoch, …)
             receiver.expect(key, n)            before the Launch leaves
             receiver.receive(key, n, timeout)  when the forward has ended
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind, PlaneOffer, host_id
from ssd_engine.tensor_plane.protocol.records import SECRET_BYTES
from ssd_engine.tensor_plane.protocol.rows import RowsFormat
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from ssd_engine.tensor_plane.transports.address import dialled, listen
from ssd_engine.tensor_plane.transports.carriers import Meeting, RowsIn, RowsOut
from ssd_engine.tensor_plane.transports.connection import Connection, Wake, dial
from ssd_engine.tensor_plane.transports.greeting import PlaneAgreement, admit, greet
from ssd_engine.tensor_plane.transports.process_group import (
    ProcessGroupIn,
    ProcessGroupOut,
    leave_nccl_errors_to_us,
    make_gloo,
    make_nccl,
)
from ssd_engine.tensor_plane.transports.shared_memory import SharedMemoryIn, SharedMemoryOut
from ssd_engine.tensor_plane.transports.staging import device_id, make_staging
from ssd_engine.tensor_plane.transports.stream import StreamIn, StreamOut

CONNECT_SECONDS = 10.0
MAX_QUEUED = 64
MAX_EXPECTED = 256


def local_offer(device: torch.device) -> PlaneOffer:
    """What this process can do, with its rows on this device."""
    host = host_id()
    able = {
        PlaneKind.SHARED_MEMORY: bool(host),
        PlaneKind.TCP: True,
        PlaneKind.GLOO: dist.is_gloo_available(),
        PlaneKind.NCCL: device.type == "cuda" and dist.is_nccl_available(),
    }
    return PlaneOffer(tuple(kind for kind in able if able[kind]), host, device_id(device))


def open_sender(
    kind: PlaneKind,
    epoch: int,
    *,
    bind_host: str,
    rows: RowsFormat,
    device: torch.device,
    ports: range | None = None,
    max_queued: int = MAX_QUEUED,
    connect_timeout_s: float = CONNECT_SECONDS,
) -> tuple[Sender, PlaneAnswer]:
    """The draft's end, waiting for its target, and the answer that brings the target here.

    ``ports``: where to listen, for a kind that listens on a port; None: on any that is free.
    """
    _prepare(kind, device)
    terms, staging = PlaneAgreement(kind, epoch, rows), make_staging(device)
    secret = secrets.token_bytes(SECRET_BYTES)
    deadline = time.monotonic() + connect_timeout_s
    listener, address = listen(kind, bind_host, ports)

    def connect(wake: Wake, resources: ExitStack) -> tuple[Connection, RowsOut]:
        with listener:
            connection = admit(listener, wake, terms, secret, deadline)
        resources.callback(connection.close)
        name = _group_name(epoch, secret)
        out = _OUT[kind](Meeting(connection, wake, rows, staging, name, deadline))
        resources.callback(out.close)
        return connection, out

    sender = Sender(f"{kind.value} sender {epoch}", connect, deadline, rows, staging, max_queued)
    return sender, PlaneAnswer(kind, address, secret)


def open_receiver(
    answer: PlaneAnswer,
    epoch: int,
    *,
    rows: RowsFormat,
    device: torch.device,
    dial_host: str | None = None,
    max_expected: int = MAX_EXPECTED,
    connect_timeout_s: float = CONNECT_SECONDS,
) -> Receiver:
    """The target's end, on its way to the draft.

    With ``dial_host`` only the port of the answer's address is used: the draft cannot send the
    target to a host that its operator did not name, and may listen on every interface.
    """
    kind = answer.kind
    _prepare(kind, device)
    terms, staging = PlaneAgreement(kind, epoch, rows), make_staging(device)
    deadline = time.monotonic() + connect_timeout_s

    def connect(wake: Wake, resources: ExitStack) -> tuple[Connection, RowsIn]:
        connection = dial(*dialled(kind, answer.address, dial_host), wake, deadline)
        resources.callback(connection.close)
        greet(connection, terms, answer.secret, deadline)
        name = _group_name(epoch, answer.secret)
        inward = _IN[kind](Meeting(connection, wake, rows, staging, name, deadline))
        resources.callback(inward.close)
        return connection, inward

    return Receiver(
        f"{kind.value} receiver {epoch}", connect, deadline, rows, staging, max_expected
    )


def _prepare(kind: PlaneKind, device: torch.device) -> None:
    if kind is PlaneKind.NCCL:
        if device.type != "cuda":
            raise ValueError("an NCCL plane joins CUDA devices")
        leave_nccl_errors_to_us()


def _group_name(epoch: int, secret: bytes) -> str:
    return f"ssd-plane/{epoch}/{hashlib.sha256(secret).hexdigest()[:16]}"


_OUT: dict[PlaneKind, Callable[[Meeting], RowsOut]] = {
    PlaneKind.SHARED_MEMORY: SharedMemoryOut,
    PlaneKind.TCP: StreamOut,
    PlaneKind.GLOO: lambda meeting: ProcessGroupOut(meeting, make_gloo),
    PlaneKind.NCCL: lambda meeting: ProcessGroupOut(meeting, make_nccl),
}
_IN: dict[PlaneKind, Callable[[Meeting], RowsIn]] = {
    PlaneKind.SHARED_MEMORY: SharedMemoryIn,
    PlaneKind.TCP: StreamIn,
    PlaneKind.GLOO: lambda meeting: ProcessGroupIn(meeting, make_gloo),
    PlaneKind.NCCL: lambda meeting: ProcessGroupIn(meeting, make_nccl),
}
