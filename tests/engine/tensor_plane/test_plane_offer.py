"""What a process with a GPU offers for a plane, as its operator and its library allow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_engine.tensor_plane import plane as plane_module
from ssd_engine.tensor_plane.plane import local_offer
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.transports import staging as staging_module
from ssd_engine.tensor_plane.transports.staging import make_staging

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
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


def answer(missing: str | None) -> Any:
    return lambda: missing


def test_the_gpu_is_the_one_that_the_engine_computes_on(second_gpu: list[torch.device]) -> None:
    assert local_offer(CUDA).device_id == "GPU-1"
    assert local_offer(torch.device("cuda", 0)).device_id == "GPU-0"
    staged = [make_staging(CUDA), make_staging(torch.device("cuda", 0))]
    assert [each.device.index for each in staged] == [1, 0]
    assert [device.index for device in second_gpu] == [1, 0]
    assert isinstance(make_staging(torch.device("cpu")), staging_module.HostStaging)


def test_every_kind_is_offered_and_nccl_is_not_asked_to_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plane_module, "share_gpus", lambda: pytest.fail("it was asked"))
    offer = local_offer(CUDA)
    assert set(offer.kinds) == set(PlaneKind)
    assert not offer.shares_gpu


@pytest.mark.parametrize("missing", [None, "NCCL 2.28.9 does not allow that"])
def test_one_gpu_is_shared_where_nccl_alone_is_allowed(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plane_module, "share_gpus", answer(missing))
    with caplog.at_level("INFO"):
        offer = local_offer(CUDA, allowed=(PlaneKind.NCCL,))
    assert offer.kinds == (PlaneKind.NCCL,)
    assert offer.shares_gpu == (missing is None)
    assert (missing or "") in caplog.text


def test_torch_without_nccl_offers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_module.dist, "is_nccl_available", lambda: False)
    assert PlaneKind.NCCL not in local_offer(CUDA).kinds
