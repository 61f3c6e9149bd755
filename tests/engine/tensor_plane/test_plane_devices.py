"""Planes whose rows lie on CUDA devices."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssd_engine.process.nccl_library import share_gpus
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.transports.process_group import NcclGroup, leave_nccl_errors_to_us
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    make_receiver,
    make_rows,
    make_sender,
    peer,
    wait_up,
)
from tests.engine.tensor_plane.planes import break_off, hardened_kind
from tests.waiting import HANG_SECONDS, wait_until

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@hardened_kind
def test_rows_go_from_device_to_device(kind: PlaneKind) -> None:
    cuda, stream = torch.device("cuda", 0), replace(DISTRIBUTIONS, width=150_000)
    sender, answer = make_sender(kind, stream=stream, device=cuda)
    receiver = make_receiver(answer, stream=stream, device=cuda)
    wait_up(receiver, sender)
    for round_ in range(20):
        key, rows = RowsKey(1, round_), torch.randn(6, 150_000, device=cuda).bfloat16()
        receiver.expect(key, 6)
        sender.send(key, rows)
        torch.cuda._sleep(10_000_000)  # the engine goes on computing
        landed = receiver.receive(key, 6, HANG_SECONDS)
        assert landed is not None
        assert landed.device == cuda
        assert torch.equal(landed, rows)
    sender.close()
    receiver.close()


@pytest.mark.gpu
@needs_gpu
def test_rows_do_not_wait_for_what_was_launched_after_them() -> None:
    cuda = torch.device("cuda", 0)
    sender, answer = make_sender(PlaneKind.SHARED_MEMORY, device=cuda)
    receiver = make_receiver(answer, device=cuda)
    wait_up(receiver, sender)
    rows, after = make_rows(1, 6).to(cuda), torch.cuda.Event()
    # The first has the warm-up in it; the second keeps the device busy for about ten seconds.
    for round_, cycles in enumerate((1, 20_000_000_000)):
        torch.cuda.synchronize()
        key = RowsKey(1, round_)
        receiver.expect(key, 6)
        sender.send(key, rows)
        torch.cuda._sleep(cycles)
        after.record()
        assert receiver.receive(key, 6, HANG_SECONDS) is not None
    assert not after.query()  # the device is still busy with it
    torch.cuda.synchronize()
    sender.close()
    receiver.close()


@pytest.mark.gpu
@needs_gpu
def test_a_communicator_can_be_made_and_aborted_again_and_again() -> None:
    leave_nccl_errors_to_us()
    device = torch.device("cuda", 0)
    for epoch in range(5):
        store = dist.PrefixStore(f"epoch {epoch}", dist.HashStore())
        group = NcclGroup(store, 0, device, lambda: False, size=1)
        group.abort()


@pytest.mark.gpu
@needs_gpu
def test_a_communicator_that_cannot_be_made_breaks_the_plane_alone() -> None:
    """NCCL before 2.30 refuses two ranks on one device; later ones carry the rows."""
    cuda = torch.device("cuda", 0)
    sender, answer = make_sender(PlaneKind.NCCL, device=cuda, connect_timeout_s=60.0)
    receiver = make_receiver(answer, device=cuda, connect_timeout_s=60.0)
    wait_until(lambda: receiver.state is not PlaneState.CONNECTING)
    wait_until(lambda: sender.state is receiver.state)
    if receiver.state is PlaneState.UP:
        receiver.expect(RowsKey(1, 1), 6)
        sender.send(RowsKey(1, 1), make_rows(1, 6).to(cuda))
        assert receiver.receive(RowsKey(1, 1), 6, HANG_SECONDS) is not None
    sender.close()
    receiver.close()
    assert sender.join(HANG_SECONDS)
    assert receiver.join(HANG_SECONDS)


@pytest.mark.gpu
@needs_gpu
def test_processes_that_share_a_gpu_are_joined_by_nccl_as_often_as_one_dies() -> None:
    missing = share_gpus()
    if missing is not None:
        pytest.skip(missing)
    cuda, stream = torch.device("cuda", 0), replace(DISTRIBUTIONS, width=150_000)
    about: dict[str, Any] = {"device": cuda, "stream": stream, "connect_timeout_s": 60.0}
    for epoch in (1, 2):
        with peer() as draft:
            assert draft.call("share_gpus") is None
            receiver = make_receiver(
                draft.call("open_sender", PlaneKind.NCCL, epoch, **about), epoch, **about
            )
            wait_up(receiver)
            keys = [RowsKey(epoch, number) for number in range(12)]
            for key in keys:
                receiver.expect(key, 6)
            for number, key in enumerate(keys):
                draft.call("send", key, 6, number)
            for number, key in enumerate(keys):
                landed = receiver.receive(key, 6, HANG_SECONDS)
                assert landed is not None
                assert torch.equal(landed.cpu(), make_rows(number, 6, stream))
            draft.kill()
            wait_until(lambda receiver=receiver: receiver.state is PlaneState.BROKEN)  # type: ignore[misc]
        assert receiver.join(HANG_SECONDS)


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_go_from_one_device_to_another_by_nccl() -> None:
    stream = replace(DISTRIBUTIONS, width=150_000)
    for epoch in range(1, 4):
        first, second = (torch.device("cuda", i) for i in range(2))
        sender, answer = make_sender(PlaneKind.NCCL, epoch, stream=stream, device=first)
        receiver = make_receiver(answer, epoch, stream=stream, device=second)
        wait_up(receiver, sender)
        rows = make_rows(epoch, 6, stream).to("cuda:0")
        receiver.expect(RowsKey(1, 1), 6)
        sender.send(RowsKey(1, 2), rows)  # nobody's
        sender.send(RowsKey(1, 1), rows)
        landed = receiver.receive(RowsKey(1, 1), 6, HANG_SECONDS)
        assert landed is not None
        assert landed.device == torch.device("cuda", 1)
        assert torch.equal(landed.cpu(), rows.cpu())
        break_off(sender if epoch % 2 else receiver, "for the test")
        assert sender.join(HANG_SECONDS)
        assert receiver.join(HANG_SECONDS)
