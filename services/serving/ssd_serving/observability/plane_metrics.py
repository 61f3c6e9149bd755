"""Tensor planes as metrics: how many are up, by what they carry and how it travels."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric

from ssd_engine.tensor_plane.protocol.handshake import PlaneKind
from ssd_engine.tensor_plane.protocol.state import PlaneState

STREAMS = ("draft_distributions", "features")


class PlaneLike(Protocol):
    """The part of a plane's report that is counted."""

    @property
    def stream(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def state(self) -> str: ...


class PlaneCollector:
    """``planes`` gives the reports of all planes as they stand now."""

    def __init__(self, name: str, planes: Callable[[], Iterable[PlaneLike]]) -> None:
        self._name, self._planes = name, planes

    def collect(self) -> Iterator[Metric]:
        up = Counter(
            (each.stream, each.kind) for each in self._planes() if each.state == PlaneState.UP.value
        )
        metric = GaugeMetricFamily(
            self._name,
            "Tensor planes that are up, by what they carry and how it travels.",
            labels=["stream", "kind"],
        )
        for stream in STREAMS:
            for kind in PlaneKind:
                metric.add_metric([stream, kind.value], up[stream, kind.value])
        yield metric
