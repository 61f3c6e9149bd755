"""What two peers say of the tensor plane in their handshake, and the kind that follows from it.

No torch here: the edge converts these from and to the messages of the link.
"""

import hashlib
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class PlaneKind(Enum):
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True)
class PlaneOffer:
    """What one side can do; an empty id is equal to nothing."""

    kinds: tuple[PlaneKind, ...]
    host_id: str = ""
    device_id: str = ""


@dataclass(frozen=True)
class PlaneAnswer:
    """Where the draft waits for the target, and what lets the target in, once."""

    kind: PlaneKind
    address: str
    secret: bytes = field(repr=False)


def choose_kind(offer: PlaneOffer, ours: PlaneOffer, fixed_ports: bool = False) -> PlaneKind | None:
    """The best kind that both sides know and that can join these two, or None.

    ``fixed_ports``: something between the two lets only known ports pass. NCCL and gloo take
    whichever they find.
    """
    common = set(offer.kinds) & set(ours.kinds)
    if fixed_ports:
        common -= {PlaneKind.NCCL, PlaneKind.GLOO}
    if not _same(offer.host_id, ours.host_id):
        common.discard(PlaneKind.SHARED_MEMORY)
    if not (offer.device_id and ours.device_id) or _same(offer.device_id, ours.device_id):
        common.discard(PlaneKind.NCCL)
    # TCP before gloo: it survives a peer that sends more than it announced, gloo does not.
    order = (PlaneKind.SHARED_MEMORY, PlaneKind.NCCL, PlaneKind.TCP, PlaneKind.GLOO)
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
