"""A peer that is slow, stopped or dead costs the other end this plane, and no more."""

import socket

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
    dialled_by_a_test,
    every_kind,
    expect_break,
    left_behind,
    same_bits,
)
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
        answer = draft.call("open_sender", kind, 1)
        receiver = make_receiver(answer)
        wait_up(receiver)
        draft.call("wait_up")
        for round_ in range(200):
            receiver.expect(RowsKey(1, round_), 6)
        draft.call("flood", 1000)
        assert same_bits(receiver.receive(RowsKey(1, 5), 6, HANG_SECONDS), make_rows(5, 6))
        draft.kill()
        wait_until(lambda: receiver.state is PlaneState.BROKEN)
        with pytest.raises(PlaneBroken):
            receiver.receive(RowsKey(1, 199), 6, HANG_SECONDS)
        assert receiver.join(HANG_SECONDS)
        receiver.close()
    assert not left_behind([answer.address])


@every_kind
def test_a_receiver_that_is_killed_in_the_middle_breaks_the_plane_alone(kind: PlaneKind) -> None:
    with peer() as target:
        sender, answer = make_sender(kind)
        target.call("open_receiver", answer, 1)
        target.call("wait_up")
        wait_up(sender)
        target.call("receive_for_ever")
        for round_ in range(50):
            sender.send(RowsKey(1, round_), make_rows(round_, 6))
        target.kill()
        wait_until(lambda: not sender.send(RowsKey(2, 1), make_rows(1, 6)))
        assert sender.state is PlaneState.BROKEN
        assert sender.join(HANG_SECONDS)
        sender.close()
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
    with peer() as target:
        sender, answer = make_sender(kind, max_queued=8)
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
        sender.close()
        assert sender.join(HANG_SECONDS)


@every_kind
def test_a_draft_that_is_stopped_costs_the_target_its_wait_and_no_more(kind: PlaneKind) -> None:
    with peer() as draft:
        receiver = make_receiver(draft.call("open_sender", kind, 1))
        wait_up(receiver)
        draft.call("wait_up")
        draft.stop()  # until the end
        receiver.expect(RowsKey(1, 1), 1)
        assert receiver.receive(RowsKey(1, 1), 1, 0.05) is None
        assert receiver.state is PlaneState.UP
        receiver.close()
        assert receiver.join(HANG_SECONDS)
        with pytest.raises(PlaneBroken, match="closed"):
            receiver.receive(RowsKey(1, 2), 1, NO_LIMIT)
