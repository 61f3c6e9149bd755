"""Prometheus metrics of a service: its own, and those that its engine keeps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from ssd_engine.tracing.histogram import cumulative
from ssd_serving.observability.metrics_server import MetricsServer
from ssd_serving.security.tls import TlsFiles

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REFUSALS = ("missing", "unknown", "expired", "role", "outdated")
RELOADED = ("tls", "tokens")
TASKS = (
    "connection_room",
    "engine_watch",
    "health_port",
    "link",
    "look_up",
    "targets",
    "certificates",
)
Reads = Mapping[str, tuple[str, Callable[[Any], float]]]  # name: (text, how to read the books)


class ServiceMetrics:
    def __init__(self, role: str, books: Callable[[], Any]) -> None:
        """``books`` gives the engine's latest ones, None before the first."""
        disable_created_metrics()  # a series beside every counter, which nobody asks for
        self.registry = CollectorRegistry()
        self._books = books
        self.auth_failures = self.counter_by(
            "ssd_auth_failures",
            "Calls without a good token, or the role for it.",
            "reason",
            REFUSALS,
        )
        self.refusals = self.counter(
            "ssd_refusals", "Calls that were refused, by method and status.", ["method", "reason"]
        )
        self.reload_failures = self.counter_by(
            "ssd_reload_failures", "Changed files that could not be used.", "what", RELOADED
        )
        self.task_failures = self.counter_by(
            "ssd_task_failures",
            "Errors that ended a task of the service, which was begun again.",
            "task",
            TASKS,
        )
        self.ready = self.gauge(
            "ssd_ready", "1 while the service takes new work, 0 while it loads or drains.", ["role"]
        ).labels(role)

    def task_failed(self, name: str) -> None:
        self.task_failures.labels(name).inc()

    def counter(self, name: str, text: str, labels: Any = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def counter_by(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """A counter whose label takes these values, each shown from the start."""
        counter = self.counter(name, text, [label])
        for value in values:
            counter.labels(value)
        return counter

    def gauge(self, name: str, text: str, labels: Any = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=SECONDS)

    def engine_gauges(self, gauges: Reads) -> None:
        """Gauges are read from the engine's latest books whenever somebody looks."""
        for name, (text, read) in gauges.items():
            self.gauge(name, text).set_function(self._reader(read))

    def engine_counters(self, counters: Reads) -> None:
        self.registry.register(_EngineCounters(self._books, counters))

    def _reader(self, read: Callable[[Any], float]) -> Callable[[], float]:
        return lambda: _value(self._books(), read)

    def listen(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Serve on a thread; returns the port."""
        failed = self.reload_failures.labels("tls").inc
        refused = self.refusals.labels("metrics", "unauthenticated").inc
        server = MetricsServer(host, port, self.registry, tls, failed, refused)
        server.start()
        return int(server.server_port)


class _EngineCounters:
    """Counters that the engine keeps and the front only shows."""

    def __init__(self, books: Callable[[], Any], counters: Reads) -> None:
        self._books = books
        self._counters = counters

    def collect(self) -> Any:
        books = self._books()
        for name, (text, read) in self._counters.items():
            yield CounterMetricFamily(name, text, value=_value(books, read))


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> CounterMetricFamily | GaugeMetricFamily:
    """One metric with a value for each value of its label."""
    metric = kind(name, text, labels=[label])
    for each, value in values.items():
        metric.add_metric([each], value)
    return metric


def histogram_family(
    name: str, text: str, counts: list[int], seconds: float, at_once: int = 0
) -> HistogramMetricFamily:
    """A histogram of times that an engine has counted; ``cumulative`` explains the arguments."""
    return HistogramMetricFamily(name, text, buckets=cumulative(counts, at_once), sum_value=seconds)


def _value(books: Any, read: Callable[[Any], float]) -> float:
    return 0.0 if books is None else float(read(books))
