"""The life of an end of a tensor plane, and the kind of plane that two offers lead to."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ssd_engine.tensor_plane.protocol.handshake import (
    KIND_NAMES,
    PlaneAnswer,
    PlaneKind,
    PlaneOffer,
    choose_kind,
    kinds_named,
)
from ssd_engine.tensor_plane.protocol.state import TRANSITIONS, PlaneEvent, PlaneState, transition
from tests.engine.tensor_plane.peer import DISTRIBUTIONS


def test_the_table_of_states_is_what_it_says() -> None:
    connecting, up, broken, closed = PlaneState
    wanted = {
        connecting: {"connected": up, "failed": broken, "close": closed},
        up: {"connected": None, "failed": broken, "close": closed},
        broken: {"connected": broken, "failed": broken, "close": closed},
        closed: {"connected": closed, "failed": closed, "close": closed},
    }
    for state, event in itertools.product(PlaneState, PlaneEvent):
        if wanted[state][event.value] is None:
            with pytest.raises(ValueError):
                transition(state, event)
        else:
            assert transition(state, event) is wanted[state][event.value]
    assert len(TRANSITIONS) == len(PlaneState) * len(PlaneEvent) - 1


def test_no_sequence_of_events_revives_a_plane() -> None:
    for events in itertools.product(PlaneEvent, repeat=5):
        state, over = PlaneState.CONNECTING, False
        for event in events:
            if (state, event) not in TRANSITIONS:
                break
            state = transition(state, event)
            over |= state in (PlaneState.BROKEN, PlaneState.CLOSED)
            assert not (over and state in (PlaneState.CONNECTING, PlaneState.UP))


NCCL_ALONE = {"kinds": (PlaneKind.NCCL,)}


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        # two GPUs
        ({}, {}, PlaneKind.NCCL),
        ({}, {"host_id": "other"}, PlaneKind.NCCL),
        ({}, {"kinds": (PlaneKind.TCP, PlaneKind.SHARED_MEMORY)}, PlaneKind.SHARED_MEMORY),
        ({}, NCCL_ALONE, PlaneKind.NCCL),
        (NCCL_ALONE, {**NCCL_ALONE, "host_id": "other"}, PlaneKind.NCCL),
        # one GPU, which two containers may share
        ({}, {"device_id": "gpu0"}, PlaneKind.SHARED_MEMORY),
        ({}, {"host_id": "other", "device_id": "gpu0"}, PlaneKind.TCP),
        ({}, {**NCCL_ALONE, "device_id": "gpu0"}, None),
        ({"shares_gpu": True}, {"device_id": "gpu0", "shares_gpu": True}, PlaneKind.SHARED_MEMORY),
        (
            {"shares_gpu": True},
            {**NCCL_ALONE, "device_id": "gpu0", "shares_gpu": True},
            PlaneKind.NCCL,
        ),
        # a GPU and a CPU, or two CPUs
        ({}, {"device_id": ""}, PlaneKind.SHARED_MEMORY),
        ({}, {**NCCL_ALONE, "device_id": ""}, None),
        ({}, {"host_id": "other", "device_id": ""}, PlaneKind.TCP),
        ({"device_id": ""}, {"host_id": "other"}, PlaneKind.TCP),
        ({"host_id": ""}, {"host_id": "", "device_id": ""}, PlaneKind.TCP),
        ({}, {"kinds": (PlaneKind.TCP, PlaneKind.NCCL), "device_id": "gpu0"}, PlaneKind.TCP),
        ({}, {"kinds": (PlaneKind.TCP,)}, PlaneKind.TCP),
        ({}, {"kinds": (PlaneKind.SHARED_MEMORY,), "host_id": "other"}, None),
        ({}, {"kinds": ()}, None),
    ],
)
def test_the_kind_follows_from_both_offers(
    ours: dict[str, Any], theirs: dict[str, Any], kind: PlaneKind | None
) -> None:
    here = {"kinds": tuple(PlaneKind), "host_id": "host", "device_id": "gpu0", **ours}
    there = {"kinds": tuple(PlaneKind), "host_id": "host", "device_id": "gpu1", **theirs}
    assert choose_kind(PlaneOffer(**there), PlaneOffer(**here)) is kind
    assert choose_kind(PlaneOffer(**here), PlaneOffer(**there)) is kind


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(PlaneAnswer(PlaneKind.TCP, "127.0.0.1:1", b"secret", DISTRIBUTIONS))


def test_with_ports_given_nothing_is_chosen_that_takes_others() -> None:
    far = PlaneOffer(tuple(PlaneKind), "there", "gpu-1")
    near = PlaneOffer(tuple(PlaneKind), "here", "gpu-0")
    assert choose_kind(far, near) is PlaneKind.NCCL
    assert choose_kind(far, near, fixed_ports=True) is PlaneKind.TCP
    beside = replace(far, host_id="here")
    assert choose_kind(beside, near, fixed_ports=True) is PlaneKind.SHARED_MEMORY
    only = PlaneOffer((PlaneKind.NCCL,), "there", "gpu-1")
    assert choose_kind(only, near, fixed_ports=True) is None


def test_a_library_that_shares_a_gpu_is_asked_on_the_side_that_chooses() -> None:
    target = PlaneOffer((PlaneKind.NCCL,), "here", "gpu-0")
    draft = replace(target, shares_gpu=True)
    assert choose_kind(target, draft) is PlaneKind.NCCL
    assert choose_kind(draft, target) is None


def test_an_operator_allows_every_kind_or_one() -> None:
    assert kinds_named("auto") == tuple(PlaneKind)
    assert [kinds_named(name) for name in KIND_NAMES[1:]] == [(kind,) for kind in PlaneKind]


def test_nccl_is_not_offered_to_a_peer_that_may_lie() -> None:
    offer = PlaneOffer(tuple(PlaneKind), "here", "gpu-0", (DISTRIBUTIONS,))
    kinds = (PlaneKind.SHARED_MEMORY, PlaneKind.TCP)
    assert offer.hardened() == replace(offer, kinds=kinds)
    assert choose_kind(offer.hardened(), offer) is PlaneKind.SHARED_MEMORY
