"""Prometheus metrics of a target. Names follow the field's habits, prefix ``ssd_``."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ssd_engine.serving.metrics import ServiceMetrics
from ssd_target.link_state import LinkState
from ssd_target.links import Links
from ssd_target.records import Stats
from ssd_target.speculation.stats import SpeculationStats


class Metrics(ServiceMetrics):
    def __init__(
        self, stats: Callable[[], Stats | None], num_blocks: Callable[[], int], links: Links
    ) -> None:
        super().__init__(stats)
        self.requests = self.counter(
            "ssd_requests", "Requests that ended, by how they ended.", ["outcome"]
        )
        self.streams_cut = self.counter(
            "ssd_streams_cut", "Streams whose client read too slowly, by the bound.", ["bound"]
        )
        for bound in ("write_timeout", "backlog"):
            self.streams_cut.labels(bound)
        self.unknown_values = self.counter(
            "ssd_unknown_values",
            "Values of newer clients in requests; the default was taken instead.",
            ["field"],
        )
        for field in ("mode", "verification"):
            self.unknown_values.labels(field)
        self.prompt_tokens = self.counter("ssd_prompt_tokens", "Prompt tokens of all requests.")
        self.generation_tokens = self.counter("ssd_generation_tokens", "Tokens that were emitted.")
        self.first_token = self.histogram(
            "ssd_time_to_first_token_seconds", "From arrival of a request to its first token."
        )
        self.inter_token = self.histogram(
            "ssd_inter_token_latency_seconds", "Between two tokens of a request."
        )
        self.latency = self.histogram(
            "ssd_e2e_request_latency_seconds", "From arrival of a request to its finish."
        )
        self._engine_books(num_blocks)
        self.registry.register(SpeculationCollector(stats, links))

    def _engine_books(self, num_blocks: Callable[[], int]) -> None:
        gauges: dict[str, tuple[str, Callable[[Stats], float]]] = {
            "ssd_num_requests_running": ("Sequences that hold blocks.", lambda s: s.running),
            "ssd_num_requests_waiting": ("Sequences not yet admitted.", lambda s: s.waiting),
            "ssd_kv_cache_usage_ratio": (
                "KV blocks in use, of all.",
                lambda s: s.used_blocks / max(1, num_blocks()),
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
            "ssd_forwards": ("Forwards of rounds.", lambda s: s.forwards),
            "ssd_forward_seconds": ("Time of these forwards.", lambda s: s.forward_seconds),
            "ssd_forward_gap_seconds": (
                "Time for which a GPU had nothing to do before them.",
                lambda s: s.gap_seconds,
            ),
        }
        self.engine_gauges(gauges)
        self.engine_counters(counters)


class SpeculationCollector:
    """Speculation as the engine and the links count it."""

    def __init__(self, stats: Callable[[], Stats | None], links: Links) -> None:
        self._stats = stats
        self._links = links

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        totals = SpeculationStats() if stats is None else stats.speculation
        yield from self._counters(totals)
        yield from self._labelled(totals)
        yield from self._link_states()
        yield CounterMetricFamily(
            "ssd_link_dropped_frames",
            "Frames and branches of endpoints that were stale, unknown or out of bounds.",
            value=0 if stats is None else stats.dropped_frames,
        )

    def _counters(self, totals: SpeculationStats) -> Iterator[Metric]:
        counters = {
            "ssd_spec_decode_num_drafts": ("Rounds with a speculation.", _drafts(totals)),
            "ssd_spec_decode_num_draft_tokens": ("Speculated tokens.", totals.drafted_tokens),
            "ssd_spec_decode_num_accepted_tokens": (
                "Speculated tokens that were right.",
                totals.accepted_tokens,
            ),
            "ssd_spec_decode_cache_tokens": (
                "Of these, the ones that came from the speculation cache.",
                totals.cache_tokens,
            ),
            "ssd_round_wait_seconds": (
                "Time that forwards were held back for branches.",
                totals.wait_micros / 1e6,
            ),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)

    def _labelled(self, totals: SpeculationStats) -> Iterator[Metric]:
        look_ups = CounterMetricFamily(
            "ssd_cache_lookups", "Look-ups in the speculation cache.", labels=["result"]
        )
        for result, value in (
            ("hit", totals.hits),
            ("late", totals.late),
            ("miss_length", totals.length_misses),
            ("miss_token", totals.token_misses),
        ):
            look_ups.add_metric([result], value)
        yield look_ups
        rounds = CounterMetricFamily(
            "ssd_rounds", "Rounds, by where their speculation came from.", labels=["source"]
        )
        for source in ("cache", "just_in_time", "ngram", "sync", "plain"):
            rounds.add_metric([source], getattr(totals, f"{source}_rounds"))
        yield rounds
        fallbacks = CounterMetricFamily(
            "ssd_fallback_rounds",
            "Rounds without the speculation that was asked for.",
            labels=["reason"],
        )
        for reason, value in totals.fallbacks.items():
            fallbacks.add_metric([reason], value)
        yield fallbacks

    def _link_states(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("ssd_links", "Links to endpoints.", labels=["state"])
        for state in LinkState:
            count = sum(link.state is state for link in self._links.links.values())
            states.add_metric([state.value], count)
        yield states
        failures = CounterMetricFamily(
            "ssd_link_failures",
            "Connections to endpoints that failed, or were broken off, by reason.",
            labels=["reason"],
        )
        for reason, count in self._links.failures().items():
            failures.add_metric([reason], count)
        yield failures
        yield CounterMetricFamily(
            "ssd_link_unknown_frames",
            "Frames that only newer endpoints understand, passed over.",
            value=self._links.unknown(),
        )


def _drafts(totals: SpeculationStats) -> int:
    return totals.full_rounds + totals.rejected_rounds


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
