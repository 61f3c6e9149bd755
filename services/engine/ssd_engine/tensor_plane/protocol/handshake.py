"""What two peers say of the tensor plane in their handshake, and the kind that follows from it.

No torch here: the edge converts these from and to the messages of the link.
"""

import hashlib
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ssd_engine.tensor_plane.protocol.streams import RowsStream

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class PlaneKind(Enum):
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    NCCL = "nccl"


@dataclass(frozen=True)
class PlaneOffer:
    """What the target can do, and the rows it can send or receive; an empty id equals nothing."""

    kinds: tuple[PlaneKind, ...]
    host_id: str = ""
    device_id: str = ""
    streams: tuple[RowsStream, ...] = ()


@dataclass(frozen=True)
class PlaneAnswer:
    """Where the draft waits for the target, what lets the target in, once, and for which rows."""

    kind: PlaneKind
    address: str
    secret: bytes = field(repr=False)
    stream: RowsStream


def choose_kind(offer: PlaneOffer, ours: PlaneOffer, fixed_ports: bool = False) -> PlaneKind | None:
    """The best kind that both sides know and that can join these two, or None.

    ``fixed_ports``: something between the two lets only known ports pass. NCCL takes
    whichever it finds.
    """
    common = set(offer.kinds) & set(ours.kinds)
    if fixed_ports:
        common.discard(PlaneKind.NCCL)
    if not _same(offer.host_id, ours.host_id):
        common.discard(PlaneKind.SHARED_MEMORY)
    if not (offer.device_id and ours.device_id) or _same(offer.device_id, ours.device_id):
        common.discard(PlaneKind.NCCL)
    order = (PlaneKind.SHARED_MEMORY, PlaneKind.NCCL, PlaneKind.TCP)
    return next((kind for kind in order if kind in common), None)


def _same(one: str, other: str) -> bool:
    return bool(one) and one == other


def host_id() -> str:
    """Equal in two processes that can hand each other memory; empty where that is not possible.

    The segment is handed over on an abstract socket, which one network namespace shares: the
    containers of a pod have that in common, but not always a /dev/shm.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        place = f"{BOOT_ID.read_text().strip()} {NETWORK_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(place.encode()).hexdigest()[:32]
