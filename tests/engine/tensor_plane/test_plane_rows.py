"""Rows cross a plane as they are, under their key and in time, or are missing and hurt nothing."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.rows import RowsKey
from ssd_engine.tensor_plane.protocol.state import PlaneState
from ssd_engine.tensor_plane.protocol.streams import RowsDirection
from ssd_engine.tensor_plane.receiver import Receiver
from ssd_engine.tensor_plane.sender import Sender
from tests.engine.tensor_plane.peer import (
    DISTRIBUTIONS,
    FEATURES,
    NO_LIMIT,
    make_drafts_end,
    make_receiver,
    make_rows,
    make_targets_end,
    peer,
    wait_up,
)
from tests.engine.tensor_plane.planes import (
    cross,
    ended,
    every_kind,
    is_waited_for,
    plane,
    same_bits,
)
from tests.waiting import HANG_SECONDS, wait_until


@every_kind
def test_rows_cross_between_processes_in_any_order(kind: PlaneKind) -> None:
    keys = {RowsKey(2**63 + s, r): 1 + (s + r) % 6 for s in range(4) for r in range(5)}
    rows = {key: make_rows(seed, count) for seed, (key, count) in enumerate(keys.items())}
    with peer() as draft:
        receiver = make_receiver(draft.call("open_sender", kind, 7), 7)
        with ended(receiver):
            wait_up(receiver)
            draft.call("wait_up")
            for key, num_rows in keys.items():
                receiver.expect(key, num_rows)
            for seed, (key, num_rows) in enumerate(keys.items()):
                assert draft.call("send", key, num_rows, seed)
            for key, num_rows in reversed(keys.items()):
                assert same_bits(receiver.receive(key, num_rows, HANG_SECONDS), rows[key])
            assert receiver.discarded == 0


@every_kind
def test_rows_of_another_width_go_the_other_way_between_processes(kind: PlaneKind) -> None:
    """The draft still waits and the target still dials; but the target sends."""
    plane, answer = make_drafts_end(kind, 7, FEATURES)
    receiver = Receiver(plane)
    with peer() as target:
        target.call("open_features", answer, 7)
        target.call("wait_up")
        wait_up(receiver)
        for key in (RowsKey(1, round_) for round_ in range(20)):
            receiver.expect(key, 9)
            assert target.call("send", key, 9, key.round)
            landed = receiver.receive(key, 9, HANG_SECONDS)
            assert same_bits(landed, make_rows(key.round, 9, FEATURES))
        target.kill()
        wait_until(lambda: receiver.state is PlaneState.BROKEN)
    assert receiver.join(HANG_SECONDS)


def test_an_end_is_made_only_for_its_direction() -> None:
    for stream, wrong, other in ((DISTRIBUTIONS, Receiver, Sender), (FEATURES, Sender, Receiver)):
        drafts, answer = make_drafts_end(PlaneKind.SHARED_MEMORY, stream=stream)
        with pytest.raises(ValueError, match=f"{stream.name} goes {stream.direction.value}"):
            wrong(drafts)
        with pytest.raises(ValueError, match=stream.direction.value):
            other(make_targets_end(answer, stream=stream))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 1001}, "other width: 1001 there, 1000 here"),
        ({"dtype": "float32"}, "other dtype: 'float32' there, 'bfloat16' here"),
        ({"direction": RowsDirection.TO_DRAFT}, "other direction: 'to_draft' there"),
        ({"name": "features"}, "declares no draft_distributions"),
    ],
)
def test_another_declaration_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    declared = [FEATURES, replace(DISTRIBUTIONS, **change)]
    with pytest.raises(ValueError, match=reason):
        DISTRIBUTIONS.agreed_with(declared)


def test_both_sides_take_the_smaller_number_of_rows() -> None:
    for rows in (4, 6, 9):
        agreed = DISTRIBUTIONS.agreed_with([FEATURES, replace(DISTRIBUTIONS, max_rows=rows)])
        assert agreed == replace(DISTRIBUTIONS, max_rows=min(rows, 6))


@every_kind
def test_rows_that_come_while_they_are_waited_for_are_received(kind: PlaneKind) -> None:
    """They need not be contiguous."""
    key, rows = RowsKey(1, 1), make_rows(1, 4, replace(DISTRIBUTIONS, width=2000))[::2, ::2]
    with plane(kind) as (sender, receiver), ThreadPoolExecutor() as threads:
        waiting = threads.submit(receiver.receive, key, 2, NO_LIMIT)
        wait_until(lambda: is_waited_for(receiver, key))
        sender.send(key, rows)
        assert same_bits(waiting.result(HANG_SECONDS), rows)


@every_kind
def test_rows_that_do_not_come_are_missing_and_hurt_nothing(kind: PlaneKind) -> None:
    with plane(kind) as (sender, receiver):
        receiver.expect(RowsKey(1, 1), 2)
        assert receiver.receive(RowsKey(1, 1), 2, 0.05) is None
        assert receiver.receive(RowsKey(2, 1), 2, 0.0) is None
        # Late rows of a key that is over are dropped, and the next round is not disturbed.
        sender.send(RowsKey(1, 1), make_rows(1, 2))
        cross(sender, receiver, RowsKey(1, 2), make_rows(2, 3))
        assert receiver.receive(RowsKey(1, 1), 2, 0.0) is None
        assert receiver.discarded == 1
        # As are more than were expected.
        receiver.expect(RowsKey(1, 3), 2)
        sender.send(RowsKey(1, 3), make_rows(1, 3))
        wait_until(lambda: receiver.discarded == 2)
        assert receiver.receive(RowsKey(1, 3), 2, 0.0) is None
        assert receiver.state is PlaneState.UP


def test_expectations_that_nobody_ends_are_given_up() -> None:
    with plane(PlaneKind.SHARED_MEMORY, max_expected=3) as (sender, receiver):
        for round_ in range(10):
            receiver.expect(RowsKey(1, round_), 1)
        for round_ in range(10):
            sender.send(RowsKey(1, round_), make_rows(round_, 1))
        assert same_bits(receiver.receive(RowsKey(1, 9), 1, HANG_SECONDS), make_rows(9, 1))
        assert receiver.discarded == 7
        assert receiver.receive(RowsKey(1, 6), 1, 0.0) is None
        assert receiver.receive(RowsKey(1, 7), 1, 0.0) is not None


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(1, 999, dtype=torch.bfloat16),
        torch.zeros(7, 1000, dtype=torch.bfloat16),
        torch.zeros(0, 1000, dtype=torch.bfloat16),
        torch.zeros(1, 1000),
        torch.zeros(1000, dtype=torch.bfloat16),
    ],
)
def test_rows_of_another_format_are_an_error_of_the_caller(rows: torch.Tensor) -> None:
    with plane(PlaneKind.SHARED_MEMORY) as (sender, receiver):
        with pytest.raises(ValueError):
            sender.send(RowsKey(1, 1), rows)
        with pytest.raises(ValueError):
            receiver.receive(RowsKey(1, 1), 7, 0.0)
        assert sender.state is receiver.state is PlaneState.UP


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0},
        {"max_rows": 0},
        {"dtype": "int64"},
        {"width": 2**30},
        {"direction": RowsDirection.UNSPECIFIED},
    ],
)
def test_a_stream_has_bounds(change: dict[str, Any]) -> None:
    DISTRIBUTIONS.check()
    with pytest.raises(ValueError):
        replace(DISTRIBUTIONS, **change).check()


@pytest.mark.parametrize("key", [(-1, 0), (2**64, 0), (0, 2**32), (0, -1)])
def test_a_key_fits_its_record(key: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        RowsKey(*key)
