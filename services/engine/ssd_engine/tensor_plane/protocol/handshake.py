"""What two peers say of the tensor plane in their handshake, and the kind that follows from it.

No torch here: the edge converts these from and to the messages of the link.
"""

import hashlib
import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from ssd_engine.tensor_plane.protocol.streams import RowsStream

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


class PlaneKind(Enum):
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    NCCL = "nccl"


ANY_KIND = "auto"
KIND_NAMES = (ANY_KIND, *(kind.value for kind in PlaneKind))  # of an operator's choice
BEST_FIRST = (PlaneKind.NCCL, PlaneKind.SHARED_MEMORY, PlaneKind.TCP)


@dataclass(frozen=True)
class PlaneOffer:
    """What the target can do, and the rows it can send or receive; an empty id equals nothing."""

    kinds: tuple[PlaneKind, ...]
    host_id: str = ""
    device_id: str = ""
    streams: tuple[RowsStream, ...] = ()
    shares_gpu: bool = False  # by NCCL, with another process; each side knows its own

    def hardened(self) -> "PlaneOffer":
        """What is offered to a peer that may lie: NCCL believes whatever its peer says."""
        return replace(self, kinds=tuple(k for k in self.kinds if k is not PlaneKind.NCCL))

    def on_this_host(self) -> "PlaneOffer":
        """What is offered where rows must not cross a network."""
        return replace(self, kinds=tuple(k for k in self.kinds if k is PlaneKind.SHARED_MEMORY))


@dataclass(frozen=True)
class PlaneAnswer:
    """Where the draft waits for the target, what lets the target in, once, and for which rows."""

    kind: PlaneKind
    address: str
    secret: bytes = field(repr=False)
    stream: RowsStream


def choose_kind(offer: PlaneOffer, ours: PlaneOffer, fixed_ports: bool = False) -> PlaneKind | None:
    """The best kind that both sides allow and that can join these two, or None: NCCL between two
    GPUs, else shared memory on one host, else TCP.

    ``fixed_ports``: something between the two lets only known ports pass. NCCL takes
    whichever it finds.
    """
    common = set(offer.kinds) & set(ours.kinds)
    if fixed_ports or not _nccl_joins(offer, ours, alone=common == {PlaneKind.NCCL}):
        common.discard(PlaneKind.NCCL)
    if not _same(offer.host_id, ours.host_id):
        common.discard(PlaneKind.SHARED_MEMORY)
    return next((kind for kind in BEST_FIRST if kind in common), None)


def _nccl_joins(offer: PlaneOffer, ours: PlaneOffer, alone: bool) -> bool:
    """Two GPUs; or one, to debug: where the library can, and operators left no other kind."""
    if not (offer.device_id and ours.device_id):
        return False
    return offer.device_id != ours.device_id or (alone and ours.shares_gpu)


def kinds_named(name: str) -> tuple[PlaneKind, ...]:
    """The kinds that an operator allows by one of KIND_NAMES."""
    return tuple(PlaneKind) if name == ANY_KIND else (PlaneKind(name),)


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
