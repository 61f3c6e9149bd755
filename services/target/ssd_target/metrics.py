"""Prometheus metrics of a target. Names follow the field's habits, prefix ``ssd_``."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ssd_target.records import Stats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    def __init__(self, stats: Callable[[], Stats | None], num_blocks: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._stats = stats
        self._num_blocks = num_blocks
        self.requests = self._counter(
            "ssd_requests", "Requests that ended, by how they ended.", ["outcome"]
        )
        self.prompt_tokens = self._counter("ssd_prompt_tokens", "Prompt tokens of all requests.")
        self.generation_tokens = self._counter("ssd_generation_tokens", "Tokens that were emitted.")
        self.first_token = self._histogram(
            "ssd_time_to_first_token_seconds", "From arrival of a request to its first token."
        )
        self.inter_token = self._histogram(
            "ssd_inter_token_latency_seconds", "Between two tokens of a request."
        )
        self.latency = self._histogram(
            "ssd_e2e_request_latency_seconds", "From arrival of a request to its finish."
        )
        self._engine_gauges()

    def _counter(self, name: str, text: str, labels: Any = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=SECONDS)

    def _engine_gauges(self) -> None:
        """Read from the engine's latest books whenever somebody looks."""
        gauges: dict[str, tuple[str, Callable[[Stats], float]]] = {
            "ssd_num_requests_running": ("Sequences that hold blocks.", lambda s: s.running),
            "ssd_num_requests_waiting": ("Sequences not yet admitted.", lambda s: s.waiting),
            "ssd_kv_cache_usage_ratio": (
                "KV blocks in use, of all.",
                lambda s: s.used_blocks / max(1, self._num_blocks()),
            ),
            "ssd_kv_cache_reserved_blocks": (
                "KV blocks that running sequences may still take.",
                lambda s: s.reserved_blocks,
            ),
            "ssd_prefix_cache_blocks": (
                "KV blocks in the prefix cache.",
                lambda s: s.cached_blocks,
            ),
        }
        counters: dict[str, tuple[str, Callable[[Stats], float]]] = {
            "ssd_prefix_cache_query_tokens": (
                "Tokens looked up in the prefix cache.",
                lambda s: s.prompt_tokens,
            ),
            "ssd_prefix_cache_hit_tokens": (
                "Tokens whose KV was found in the prefix cache.",
                lambda s: s.hit_tokens,
            ),
            "ssd_engine_steps": ("Steps of the engine.", lambda s: s.steps),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(self._reader(read))
        self.registry.register(_EngineCounters(self._stats, counters))

    def _reader(self, read: Callable[[Stats], float]) -> Callable[[], float]:
        def value() -> float:
            stats = self._stats()
            return 0.0 if stats is None else float(read(stats))

        return value

    def listen(self, host: str, port: int) -> int:
        """Serve on a thread; returns the port."""
        server, _ = start_http_server(port, addr=host, registry=self.registry)
        return int(server.server_port)


class _EngineCounters:
    """Counters that the engine keeps and the front only shows."""

    def __init__(
        self,
        stats: Callable[[], Stats | None],
        counters: dict[str, tuple[str, Callable[[Stats], float]]],
    ) -> None:
        self._stats = stats
        self._counters = counters

    def collect(self) -> Any:
        from prometheus_client.core import CounterMetricFamily

        stats = self._stats()
        for name, (text, read) in self._counters.items():
            value = 0.0 if stats is None else float(read(stats))
            yield CounterMetricFamily(name, text, value=value)


class RequestTimer:
    """Times one request and writes it to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = self._previous = time.monotonic()
        self._seen_token = False

    def tokens(self, count: int) -> None:
        """Tokens that arrive together share their wait."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc(count)
        if not self._seen_token:
            self._metrics.first_token.observe(now - self._arrival)
            self._seen_token = True
            count -= 1
        for _ in range(count):
            self._metrics.inter_token.observe((now - self._previous) / count)
        self._previous = now

    def end(self, outcome: str) -> float:
        elapsed = time.monotonic() - self._arrival
        self._metrics.requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self._metrics.latency.observe(elapsed)
        return elapsed
