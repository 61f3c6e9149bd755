"""Planes over a process group on the CPU: what carries rows by NCCL runs here over gloo.

No service offers this kind: it lends the carrier of process groups a library that needs no GPU.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from ssd_engine.tensor_plane.plane import CARRIERS
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.transports import process_group
from ssd_engine.tensor_plane.transports.carriers import Meeting
from ssd_engine.tensor_plane.transports.process_group import ProcessGroupIn, ProcessGroupOut

ATTEMPTS = 5  # gloo connects to a peer that is gone so often, each with its timeout


class KindOfTests(Enum):
    GLOO = "gloo"


GLOO = cast(PlaneKind, KindOfTests.GLOO)


class GlooGroup:
    def __init__(self, meeting: Meeting, store: dist.Store, rank: int) -> None:
        gloo: Any = dist.ProcessGroupGloo  # the stubs do not know its options
        host = meeting.connection._socket.getsockname()[0]
        seconds = max(0.1, meeting.deadline - time.monotonic())
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=seconds / ATTEMPTS)
        options._threads = 1
        self._peer = 1 - rank
        self._group = gloo(store, rank, 2, options)

    def send(self, data: Tensor) -> object:
        return self._group.send([data], self._peer, 0), data

    def receive(self, data: Sequence[Tensor]) -> None:
        limit = timedelta(seconds=process_group.STALL_SECONDS)
        for work in [self._group.recv([each], self._peer, 0) for each in data]:
            work.wait(limit)

    def abort(self) -> None:
        self._group = None  # its sockets and its thread end with it


CARRIERS[GLOO] = (
    lambda meeting: ProcessGroupOut(meeting, GlooGroup),
    lambda meeting: ProcessGroupIn(meeting, GlooGroup),
)
