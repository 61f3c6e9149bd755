"""The life of an end of a tensor plane, and the kind of plane that two offers lead to."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_engine.tensor_plane import plane as plane_module
from ssd_engine.tensor_plane.plane import local_offer
from ssd_engine.tensor_plane.protocol.handshake import (
    KIND_NAMES,
    PlaneAnswer,
    PlaneKind,
    PlaneOffer,
    choose_kind,
    kinds_named,
)
from ssd_engine.tensor_plane.protocol.state import TRANSITIONS, PlaneEvent, PlaneState, transition
from ssd_engine.tensor_plane.transports.staging import HostStaging, make_staging
from tests.engine.tensor_plane.peer import CPU, DISTRIBUTIONS


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


@pytest.mark.parametrize(
    ("host", "kinds", "chosen"),
    [
        ("there", tuple(PlaneKind), PlaneKind.TCP),
        ("here", tuple(PlaneKind), PlaneKind.SHARED_MEMORY),
        ("there", (PlaneKind.NCCL,), None),
    ],
)
def test_with_ports_given_nothing_is_chosen_that_takes_others(
    host: str, kinds: tuple[PlaneKind, ...], chosen: PlaneKind | None
) -> None:
    far, near = PlaneOffer(kinds, host, "gpu-1"), PlaneOffer(tuple(PlaneKind), "here", "gpu-0")
    assert choose_kind(far, near) is PlaneKind.NCCL
    assert choose_kind(far, near, fixed_ports=True) is chosen


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


# What a process offers, as its operator and its library allow.


def test_two_processes_of_one_host_share_memory() -> None:
    offer = local_offer(CPU)
    assert offer.host_id
    assert PlaneKind.NCCL not in offer.kinds
    assert choose_kind(offer, offer) is PlaneKind.SHARED_MEMORY
    only = local_offer(CPU, DISTRIBUTIONS, allowed=(PlaneKind.TCP, PlaneKind.NCCL))
    assert only == PlaneOffer((PlaneKind.TCP,), offer.host_id, "", (DISTRIBUTIONS,))
    assert choose_kind(only, offer) is PlaneKind.TCP


CUDA = torch.device("cuda")


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The engine computes on the second of two GPUs; devices whose streams were made."""
    made: list[torch.device] = []

    def describe(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(plane_module.dist, "is_nccl_available", lambda: True)
    return made


def test_the_gpu_is_the_one_that_the_engine_computes_on(second_gpu: list[torch.device]) -> None:
    assert local_offer(CUDA).device_id == "GPU-1"
    assert local_offer(torch.device("cuda", 0)).device_id == "GPU-0"
    staged = [make_staging(CUDA), make_staging(torch.device("cuda", 0))]
    assert [each.device.index for each in staged] == [1, 0]
    assert [device.index for device in second_gpu] == [1, 0]
    assert isinstance(make_staging(torch.device("cpu")), HostStaging)


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("has_nccl", [True, False])
def test_every_kind_is_offered_and_nccl_is_not_asked_to_share(
    has_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "share_gpus", lambda: pytest.fail("it was asked"))
    monkeypatch.setattr(plane_module.dist, "is_nccl_available", lambda: has_nccl)
    offer = local_offer(CUDA)
    assert set(offer.kinds) == set(PlaneKind) - (set() if has_nccl else {PlaneKind.NCCL})
    assert not offer.shares_gpu


@pytest.mark.usefixtures("second_gpu")
@pytest.mark.parametrize("missing", [None, "NCCL 2.28.9 does not allow that"])
def test_one_gpu_is_shared_where_nccl_alone_is_allowed(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plane_module, "share_gpus", lambda: missing)
    with caplog.at_level("INFO"):
        offer = local_offer(CUDA, allowed=(PlaneKind.NCCL,))
    assert (offer.kinds, offer.shares_gpu) == ((PlaneKind.NCCL,), missing is None)
    assert (missing or "") in caplog.text
