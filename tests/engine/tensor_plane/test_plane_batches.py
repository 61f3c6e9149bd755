"""Sends that were announced together are received together, in their order."""

from collections.abc import Sequence
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ssd_engine.tensor_plane.plane import CARRIERS
from ssd_engine.tensor_plane.protocol.records import WINDOW
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.transports.process_group import NcclGroup, ProcessGroupIn
from tests.engine.tensor_plane.gloo import GLOO, GlooGroup
from tests.engine.tensor_plane.peer import CPU, make_rows
from tests.engine.tensor_plane.planes import plane, same_bits
from tests.waiting import HANG_SECONDS, wait_until


class RecordingGroup(GlooGroup):
    """Notes how many receives are posted at a time."""

    batches: ClassVar[list[int]] = []

    def receive(self, data: Sequence[Tensor]) -> None:
        self.batches.append(len(data))
        super().receive(data)


def test_what_is_announced_together_is_received_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the receiver is held up, a window of sends is announced; it then posts all of them."""
    made = (CARRIERS[GLOO][0], lambda meeting: ProcessGroupIn(meeting, RecordingGroup))
    monkeypatch.setattr(RecordingGroup, "batches", [])
    monkeypatch.setitem(CARRIERS, GLOO, made)
    keys = [RowsKey(1, number) for number in range(WINDOW + 1)]
    with plane(GLOO) as (sender, receiver):
        for key in keys:
            receiver.expect(key, 6)
        with receiver._news:  # its thread is held up while it keeps the first rows
            sender.send(keys[0], make_rows(0, 6))
            wait_until(lambda: RecordingGroup.batches == [1, 1])  # the meeting's byte came first
            for key in keys[1:WINDOW]:
                sender.send(key, make_rows(key.round, 6))
            wait_until(lambda: sender.sent == WINDOW)
        sender.send(keys[WINDOW], make_rows(WINDOW, 6))
        for key in keys:
            assert same_bits(receiver.receive(key, 6, HANG_SECONDS), make_rows(key.round, 6))
    assert sum(RecordingGroup.batches) == 1 + len(keys)
    assert max(RecordingGroup.batches) > 1


def test_nccl_gets_them_as_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a process group of NCCL: what notes what is asked of it. Events have passed."""
    library = Mock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(return_value=library), raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    group = NcclGroup(dist.HashStore(), 0, CPU, lambda: False)
    assert group.send(torch.zeros(3))
    group.receive([torch.zeros(4), torch.zeros(2)])
    one_send = ["_start_coalescing", "send", "_end_coalescing"]
    two_receives = ["_start_coalescing", "recv", "recv", "_end_coalescing"]
    begun, *asked = (name for name, _, _ in library.mock_calls)
    assert begun == "eager_connect_single_device"
    assert asked == [*one_send, *two_receives, "_end_coalescing().wait"]
    assert [call.args[1] for call in library.recv.mock_calls] == [1, 1]  # from its peer
    # One that fails is ended: whatever the library is in the middle of, an abort comes after it.
    library.reset_mock()
    library.recv.side_effect = RuntimeError("the library fails")
    with pytest.raises(RuntimeError, match="the library fails"):
        group.receive([torch.zeros(4)])
    assert [name for name, _, _ in library.mock_calls] == two_receives[:1] + two_receives[2:]
