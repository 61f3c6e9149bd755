"""Planes whose rows lie on CUDA devices."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_engine.process.nccl_library import share_gpus
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    make_receiver,
    make_rows,
    make_sender,
    peer,
    wait_up,
)
from tests.engine.tensor_plane.planes import (
    HARDENED,
    cross,
    ended,
    plane,
    same_bits,
)
from tests.waiting import HANG_SECONDS, wait_until

WIDE = replace(DISTRIBUTIONS, width=150_000)
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@gpu
@needs_gpu
@pytest.mark.parametrize("kind", HARDENED)
def test_rows_go_from_device_to_device(kind: PlaneKind) -> None:
    cuda = torch.device("cuda", 0)
    with plane(kind, stream=WIDE, device=cuda) as (sender, receiver):
        for round_ in range(20):
            cross(sender, receiver, RowsKey(1, round_), make_rows(round_, 6, WIDE).to(cuda))
            torch.cuda._sleep(10_000_000)  # the engine goes on computing


@gpu
@needs_gpu
def test_rows_do_not_wait_for_what_was_launched_after_them() -> None:
    cuda = torch.device("cuda", 0)
    rows, after = make_rows(1, 6).to(cuda), torch.cuda.Event()
    with plane(PlaneKind.SHARED_MEMORY, device=cuda) as (sender, receiver):
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


@gpu
@needs_gpu
def test_a_communicator_that_cannot_be_made_breaks_the_plane_alone() -> None:
    """NCCL before 2.30 refuses two ranks on one device; later ones carry the rows."""
    cuda = torch.device("cuda", 0)
    sender, answer = make_sender(PlaneKind.NCCL, device=cuda, connect_timeout_s=60.0)
    receiver = make_receiver(answer, device=cuda, connect_timeout_s=60.0)
    with ended(sender, receiver):
        wait_until(lambda: receiver.state is not PlaneState.CONNECTING)
        wait_until(lambda: sender.state is receiver.state)
        if receiver.state is PlaneState.UP:
            cross(sender, receiver, RowsKey(1, 1), make_rows(1, 6).to(cuda))


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(0, marks=[gpu, needs_gpu], id="the same"),
        pytest.param(1, marks=[pytest.mark.gpu2, needs_two_gpus], id="another"),
    ],
)
def test_processes_are_joined_by_nccl_as_often_as_one_dies(index: int) -> None:
    """The draft computes on the first device, the target on this one."""
    here = torch.device("cuda", index)
    about: dict[str, Any] = {"stream": WIDE, "connect_timeout_s": 60.0}
    if index == 0 and (missing := share_gpus()) is not None:
        pytest.skip(missing)
    for epoch in (1, 2):
        with peer() as draft:
            draft.call("share_gpus")
            there = torch.device("cuda", 0)
            answer = draft.call("open_sender", PlaneKind.NCCL, epoch, device=there, **about)
            receiver = make_receiver(answer, epoch, device=here, **about)
            wait_up(receiver)
            draft.call("send", RowsKey(epoch, 100), 6, 100)  # nobody's
            for key in (RowsKey(epoch, number) for number in range(12)):
                receiver.expect(key, 6)
                draft.call("send", key, 6, key.round)
                landed = receiver.receive(key, 6, HANG_SECONDS)
                assert landed is not None
                assert landed.device == here
                assert same_bits(landed.cpu(), make_rows(key.round, 6, WIDE))
            draft.kill()
            wait_until(lambda receiver=receiver: receiver.state is PlaneState.BROKEN)  # type: ignore[misc]
        assert receiver.join(HANG_SECONDS)
