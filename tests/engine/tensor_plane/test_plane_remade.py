"""Planes end whole: they are remade as often as they break, and leave nothing behind."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneState
from tests.engine.tensor_plane.peer import (
    NO_LIMIT,
    make_receiver,
    make_rows,
    make_sender,
    wait_up,
)
from tests.engine.tensor_plane.planes import (
    break_off,
    every_kind,
    is_waited_for,
    left_behind,
    plane,
    same_bits,
)
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until

TIMES = 20 if FULL else 10


def held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@every_kind
def test_a_plane_is_remade_as_often_as_it_breaks(kind: PlaneKind) -> None:
    with plane(kind, 1):
        pass
    before, addresses = held(), []
    for epoch in range(2, 2 + TIMES):
        early = epoch % 5 == 0  # before it is up: the other end is told, or gives up
        limit = 0.3 if early else NO_LIMIT
        sender, answer = make_sender(kind, epoch, connect_timeout_s=limit)
        receiver = make_receiver(answer, epoch, connect_timeout_s=limit)
        addresses.append(answer.address)
        if early:
            break_off(sender if epoch % 2 else receiver, "while it connects")
        else:
            wait_up(receiver, sender)
            key = RowsKey(1, epoch)
            receiver.expect(key, 2)
            sender.send(key, make_rows(epoch, 2))
            assert same_bits(receiver.receive(key, 2, HANG_SECONDS), make_rows(epoch, 2))
            receiver.expect(RowsKey(2, epoch), 1)  # left open
            sender.send(RowsKey(4, epoch), make_rows(epoch, 1))  # nobody's
            break_off(sender if epoch % 2 else receiver, "for the test")
        for end in (sender, receiver):
            assert end.join(HANG_SECONDS)
            assert end.state is PlaneState.BROKEN
            end.close()
    if kind is PlaneKind.SHARED_MEMORY:  # a port may be given again, a name is not
        assert len(set(addresses)) == TIMES
    assert not left_behind(addresses)
    wait_until(lambda: held()[0] <= before[0] + 1 and held()[1] <= before[1] + 1)


def test_closing_wakes_whoever_waits() -> None:
    key = RowsKey(1, 1)
    with plane(PlaneKind.SHARED_MEMORY) as (_, receiver), ThreadPoolExecutor() as threads:
        waiting = threads.submit(receiver.receive, key, 1, NO_LIMIT)
        wait_until(lambda: is_waited_for(receiver, key))
        receiver.close()
        with pytest.raises(PlaneBroken):
            waiting.result(HANG_SECONDS)
        receiver.close()
        break_off(receiver, "after its end")
        assert receiver.state is PlaneState.CLOSED


def test_a_process_ends_well_with_its_planes_open() -> None:
    program = """
        import torch
        from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
        from ssd_engine.tensor_plane.protocol.rows import RowsKey
        from tests.engine.tensor_plane.gloo import GLOO
        from tests.engine.tensor_plane.peer import make_receiver, make_rows, make_sender, wait_up
        for kind in (PlaneKind.SHARED_MEMORY, PlaneKind.TCP, GLOO):
            sender, answer = make_sender(kind)
            receiver = make_receiver(answer)
            wait_up(receiver, sender)
            receiver.expect(RowsKey(1, 1), 1)
            sender.send(RowsKey(1, 1), make_rows(1, 1))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
