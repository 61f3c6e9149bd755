"""Sends that were announced together are received together, in their order."""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ssd_engine.tensor_plane.plane import CARRIERS
from ssd_engine.tensor_plane.protocol.records import WINDOW
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.transports.process_group import NcclGroup, ProcessGroupIn
from tests.engine.tensor_plane.gloo import GLOO, GlooGroup
from tests.engine.tensor_plane.peer import make_receiver, make_rows, make_sender, wait_up
from tests.waiting import HANG_SECONDS, wait_until

CPU = torch.device("cpu")


class RecordingGroup(GlooGroup):
    """Notes how many receives are posted at a time."""

    batches: ClassVar[list[int]] = []

    def receive(self, data: Sequence[Tensor]) -> None:
        self.batches.append(len(data))
        super().receive(data)


def test_what_is_announced_together_is_received_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the receiver is held up, a window of sends is announced; it then posts all of them."""
    inward: list[ProcessGroupIn] = []

    def make(meeting: Any) -> ProcessGroupIn:
        inward.append(ProcessGroupIn(meeting, RecordingGroup))
        return inward[0]

    monkeypatch.setattr(RecordingGroup, "batches", [])
    monkeypatch.setitem(CARRIERS, GLOO, (CARRIERS[GLOO][0], make))
    sender, answer = make_sender(GLOO)
    receiver = make_receiver(answer)
    wait_up(sender, receiver)
    keys = [RowsKey(1, number) for number in range(WINDOW + 1)]
    for key in keys:
        receiver.expect(key, 6)
    with receiver._news:  # its thread is held up while it keeps the first rows
        sender.send(keys[0], make_rows(0, 6))
        wait_until(lambda: RecordingGroup.batches == [1, 1])  # the byte of the meeting came first
        for number in range(1, WINDOW):
            sender.send(keys[number], make_rows(number, 6))
        wait_until(lambda: sender.sent == WINDOW)
    sender.send(keys[WINDOW], make_rows(WINDOW, 6))
    for number, key in enumerate(keys):
        rows = receiver.receive(key, 6, HANG_SECONDS)
        assert rows is not None
        assert torch.equal(rows, make_rows(number, 6))
    assert sum(RecordingGroup.batches) == 1 + len(keys)
    assert max(RecordingGroup.batches) > 1
    assert inward[0]._fetched == {}
    for end in (sender, receiver):
        end.close()
        assert end.join(HANG_SECONDS)


class LibraryOfTests:
    """Says what is asked of a process group of NCCL."""

    said: ClassVar[list[str]] = []
    fails = False

    class Options:
        _timeout = timedelta()

    def __init__(self, *about: object) -> None:
        self.said.clear()

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _start_coalescing(self) -> None:
        self.said.append("begin")

    def _end_coalescing(self) -> Any:
        self.said.append("end")
        return SimpleNamespace(wait=lambda: self.said.append("wait"))

    def send(self, data: list[Tensor], peer: int, tag: int) -> None:
        self.said.append(f"send {data[0].numel()} to {peer}")

    def recv(self, data: list[Tensor], peer: int, tag: int) -> None:
        if self.fails:
            raise RuntimeError("the library fails")
        self.said.append(f"receive {data[0].numel()} from {peer}")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[LibraryOfTests]:
    passed = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LibraryOfTests, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: passed)
    return LibraryOfTests


def test_nccl_gets_them_as_one_operation(library: type[LibraryOfTests]) -> None:
    group = NcclGroup(dist.HashStore(), 0, CPU, lambda: False)
    kept = group.send(torch.zeros(3))
    assert library.said == ["begin", "send 3 to 1", "end"]
    assert kept
    library.said.clear()
    group.receive([torch.zeros(4), torch.zeros(2)])
    assert library.said == ["begin", "receive 4 from 1", "receive 2 from 1", "end", "wait"]


def test_an_operation_that_fails_is_ended(
    library: type[LibraryOfTests], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library is in the middle of, an abort comes after it."""
    monkeypatch.setattr(library, "fails", True)
    group = NcclGroup(dist.HashStore(), 1, CPU, lambda: False)
    with pytest.raises(RuntimeError, match="the library fails"):
        group.receive([torch.zeros(4)])
    assert library.said == ["begin", "end"]
