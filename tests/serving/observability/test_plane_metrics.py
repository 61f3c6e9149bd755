"""Planes as metrics: those that are up, by stream and kind; every label from the start."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from ssd_engine.tensor_plane.distributions import DISTRIBUTIONS
from ssd_engine.tensor_plane.features import FEATURES
from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_serving.observability.plane_metrics import STREAMS, PlaneCollector


@dataclass(frozen=True)
class Reported:
    stream: str
    kind: str
    state: str


def counts(*planes: Reported) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(PlaneCollector("ssd_planes", lambda: planes))
    (family,) = registry.collect()
    return {(s.labels["stream"], s.labels["kind"]): s.value for s in family.samples}


def test_the_streams_are_those_that_planes_carry() -> None:
    assert set(STREAMS) == {DISTRIBUTIONS, FEATURES}


def test_planes_that_are_up_are_counted() -> None:
    assert counts() == {(stream, kind.value): 0 for stream in STREAMS for kind in PlaneKind}
    found = counts(
        Reported(FEATURES, "nccl", "up"),
        Reported(FEATURES, "nccl", "up"),
        Reported(FEATURES, "tcp", "broken"),
        Reported(DISTRIBUTIONS, "shared_memory", "up"),
    )
    assert {at: count for at, count in found.items() if count} == {
        (FEATURES, "nccl"): 2,
        (DISTRIBUTIONS, "shared_memory"): 1,
    }
