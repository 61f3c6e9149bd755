"""A peer that is slow, stopped or dead costs the other end this plane, and no more."""

import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_engine.tensor_plane.end import GRACE_SECONDS
from ssd_engine.tensor_plane.protocol.handshake import PlaneAnswer, PlaneKind
from ssd_engine.tensor_plane.protocol.records import WINDOW
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneBroken, PlaneState
from tests.engine.tensor_plane.gloo import GLOO
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    LOOPBACK,
    NO_LIMIT,
    make_receiver,
    make_rows,
    make_sender,
    peer,
    wait_up,
)
from tests.engine.tensor_plane.planes import (
    Clock,
    admitted_by_a_test,
    break_off,
    cross,
    dialled_by_a_test,
    ended,
    every_kind,
    expect_break,
    is_waited_for,
    left_behind,
    plane,
    same_bits,
)
from tests.suite.scale import FULL
from tests.waiting import HANG_SECONDS, wait_until


def test_until_it_is_up_nothing_is_sent_and_nothing_is_there(clock: Clock) -> None:
    sender, answer = make_sender(PlaneKind.TCP)
    assert not sender.send(RowsKey(1, 1), make_rows(1, 1))
    with socket.socket() as silent:  # accepts, and says nothing
        silent.bind((LOOPBACK, 0))
        silent.listen()
        address = f"{LOOPBACK}:{silent.getsockname()[1]}"
        receiver = make_receiver(PlaneAnswer(PlaneKind.TCP, address, answer.secret, DISTRIBUTIONS))
        assert receiver.receive(RowsKey(1, 1), 1, NO_LIMIT) is None
        assert receiver.state is PlaneState.CONNECTING  # it did not wait for that to end
        clock.pass_by(NO_LIMIT + GRACE_SECONDS / 2, sender, receiver)
        expect_break(receiver, "the peer took too long")
    wait_until(lambda: sender.state is PlaneState.BROKEN)
    assert not sender.send(RowsKey(1, 1), make_rows(1, 1))
    assert sender.dropped == 2
    assert sender.join(HANG_SECONDS)


def test_a_draft_that_makes_no_group_costs_a_thread_its_timeout_and_nobody_else(
    clock: Clock,
) -> None:
    with admitted_by_a_test(GLOO) as (receiver, _):
        assert receiver.receive(RowsKey(1, 1), 1, NO_LIMIT) is None
        assert receiver.state is PlaneState.CONNECTING  # it did not wait for the group
        clock.pass_by(NO_LIMIT + GRACE_SECONDS + 1)  # its thread has not noticed yet
        expect_break(receiver, "connecting took too long")


@every_kind
def test_a_sender_that_is_killed_in_the_middle_breaks_the_plane_alone(kind: PlaneKind) -> None:
    with peer() as draft:
        answer = draft.call("open_sender", kind, 1, max_queued=1000)
        receiver = make_receiver(answer)
        wait_up(receiver)
        draft.call("wait_up")
        for round_ in range(200):
            receiver.expect(RowsKey(1, round_), 6)
        draft.call("flood", 1000)
        assert same_bits(receiver.receive(RowsKey(1, 5), 6, HANG_SECONDS), make_rows(5, 6))
        draft.kill()
        expect_break(receiver, ".")
        receiver.close()
    assert not left_behind([answer.address])


@every_kind
def test_a_receiver_that_is_killed_in_the_middle_breaks_the_plane_alone(kind: PlaneKind) -> None:
    sender, answer = make_sender(kind)
    with peer() as target, ended(sender):
        target.call("open_receiver", answer, 1)
        target.call("wait_up")
        wait_up(sender)
        for round_ in range(50):
            sender.send(RowsKey(1, round_), make_rows(round_, 6))
        target.kill()
        wait_until(lambda: not sender.send(RowsKey(2, 1), make_rows(1, 6)))
        assert sender.state is PlaneState.BROKEN
    assert not left_behind([answer.address])


@every_kind
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_peer_that_is_killed_while_it_connects_leaves_no_thread(
    kind: PlaneKind, role: str
) -> None:
    """It has been admitted, or has admitted, and goes no further."""
    held_by_a_test = admitted_by_a_test if role == "draft" else dialled_by_a_test
    with held_by_a_test(kind) as (end, connection):
        connection.close()
        wait_until(lambda: end.state is PlaneState.BROKEN)
        assert end.join(HANG_SECONDS)


@every_kind
def test_a_target_that_does_not_read_costs_the_draft_its_oldest_rows(kind: PlaneKind) -> None:
    sender, answer = make_sender(kind, max_queued=8)
    with peer() as target, ended(sender):
        target.call("open_receiver", answer, 1)
        target.call("wait_up")
        wait_up(sender)
        target.stop()
        rows = make_rows(1, 6)
        for round_ in range(300):  # none of them waits for the target, which is stopped
            assert sender.send(RowsKey(1, round_), rows)
        wait_until(lambda: sender.sent == WINDOW)
        assert sender.dropped >= 300 - WINDOW - 8
        target.go_on()
        wait_until(lambda: sender.sent + sender.dropped == 300)
        assert sender.sent >= 8
        assert sender.state is PlaneState.UP


@every_kind
def test_a_draft_that_is_stopped_costs_the_target_its_wait_and_no_more(kind: PlaneKind) -> None:
    with peer() as draft:
        receiver = make_receiver(draft.call("open_sender", kind, 1))
        with ended(receiver):
            wait_up(receiver)
            draft.call("wait_up")
            draft.stop()  # until the end
            receiver.expect(RowsKey(1, 1), 1)
            assert receiver.receive(RowsKey(1, 1), 1, 0.05) is None
            assert receiver.state is PlaneState.UP
        with pytest.raises(PlaneBroken, match="closed"):
            receiver.receive(RowsKey(1, 2), 1, NO_LIMIT)


# Planes end whole: they are remade as often as they break, and leave nothing behind.

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
            cross(sender, receiver, RowsKey(1, epoch), make_rows(epoch, 2))
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
