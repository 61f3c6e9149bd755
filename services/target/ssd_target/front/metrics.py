"""Prometheus metrics of a target. Names follow common practice; their prefix is ``ssd_``."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ssd_serving.observability.metrics import ServiceMetrics, histogram_family, labelled
from ssd_serving.observability.plane_metrics import PlaneCollector, PlaneLike
from ssd_serving.rpc.speculator_kinds import KINDS
from ssd_serving.security.allowances import Allowance
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links
from ssd_target.records.engine_records import TargetEngineStats
from ssd_target.records.speculation_options import Mode
from ssd_target.records.speculation_stats import FALLBACKS, LOOK_UPS, SpeculationStats, per_position

OUTCOMES = ("stop", "length", "cancelled", "refused", "handed_over", "error")


class TargetMetrics(ServiceMetrics):
    def __init__(
        self,
        stats: Callable[[], TargetEngineStats | None],
        num_blocks: Callable[[], int],
        links: Links,
        depth: int,
        inside: str | None = None,
    ) -> None:
        """``depth`` is that of the longest speculation; ``inside`` the kind of the draft in it."""
        super().__init__("target", stats)
        self.requests = self.counter_by(
            "ssd_requests", "Requests that ended, by how they ended.", "outcome", OUTCOMES
        )
        self.limited_requests = self.counter_by(
            "ssd_limited_requests",
            "Requests beyond what their identity may use.",
            "limit",
            [field.name for field in fields(Allowance)],
        )
        self.streams_cut = self.counter_by(
            "ssd_streams_cut",
            "Streams whose client read too slowly, by the bound.",
            "bound",
            ("write_timeout", "backlog"),
        )
        self.unknown_values = self.counter_by(
            "ssd_unknown_values",
            "Values of newer clients in requests; the default was taken instead.",
            "field",
            ("mode", "verification"),
        )
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
        self._engine_gauges(num_blocks)
        self._engine_counters()
        self.registry.register(SpeculationCollector(stats, links, depth))
        self.registry.register(DraftCollector(links, inside))
        self.registry.register(PlaneCollector("ssd_planes", partial(_planes, stats)))

    def _engine_gauges(self, num_blocks: Callable[[], int]) -> None:
        gauges: dict[str, tuple[str, Callable[[TargetEngineStats], float]]] = {
            "ssd_sequences_active": (
                "Sequences that the engine holds, running or waiting.",
                lambda s: s.running + s.waiting,
            ),
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
            "ssd_kv_swapped_blocks": (
                "KV blocks of sequences that were set aside, in the host's memory.",
                lambda s: s.swapped_blocks,
            ),
            "ssd_prefix_cache_blocks": (
                "KV blocks in the prefix cache.",
                lambda s: s.cached_blocks,
            ),
            "ssd_kept_features_bytes": (
                "Hidden states of these blocks that are kept for heads.",
                lambda s: s.kept_feature_bytes,
            ),
        }
        self.engine_gauges(gauges)

    def _engine_counters(self) -> None:
        counters: dict[str, tuple[str, Callable[[TargetEngineStats], float]]] = {
            "ssd_prefix_cache_query_tokens": (
                "Tokens looked up in the prefix cache.",
                lambda s: s.prompt_tokens,
            ),
            "ssd_prefix_cache_hit_tokens": (
                "Tokens whose KV was found in the prefix cache.",
                lambda s: s.hit_tokens,
            ),
            "ssd_sequences_set_aside": (
                "Running sequences that gave up their KV blocks for want of free ones.",
                lambda s: s.set_aside,
            ),
            "ssd_sequences_swapped_out": (
                "Of these, the ones whose KV was kept in the host's memory.",
                lambda s: s.swapped_out,
            ),
            "ssd_replayed_tokens": (
                "Tokens that were computed again after their sequence was set aside.",
                lambda s: s.replayed_tokens,
            ),
            "ssd_feature_rows": (
                "Rows of hidden states that were sent to heads.",
                lambda s: s.feature_rows,
            ),
            "ssd_feature_bytes": ("Bytes of these rows.", lambda s: s.feature_bytes),
            "ssd_feature_rows_missed": (
                "Such rows that were gone before they could be sent.",
                lambda s: s.missed_features,
            ),
            "ssd_feature_rows_reread": (
                "Rows that were computed once more, as the prefix cache had spared them.",
                lambda s: s.reread_features,
            ),
            "ssd_feature_requests": (
                "Requests of heads to be told a sequence from a position on.",
                lambda s: s.feature_requests,
            ),
            "ssd_feature_requests_refused": (
                "Further ones, which came too often.",
                lambda s: s.refused_feature_requests,
            ),
            "ssd_engine_steps": ("Steps of the engine.", lambda s: s.steps),
            "ssd_forwards": ("Forwards of rounds.", lambda s: s.forwards),
            "ssd_forward_seconds": ("Time of these forwards.", lambda s: s.forward_seconds),
            "ssd_forward_gap_seconds": (
                "Time for which a GPU had nothing to do between two that followed each other.",
                lambda s: s.gap_seconds,
            ),
        }
        self.engine_counters(counters)


class SpeculationCollector:
    """Speculation as the engine and the links count it; a request counts when it has ended."""

    def __init__(
        self, stats: Callable[[], TargetEngineStats | None], links: Links, depth: int
    ) -> None:
        self._stats = stats
        self._links = links
        self._depth = depth

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
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        yield histogram_family(
            "ssd_round_wait_seconds",
            "Time for which the forward of a round was held back for a branch.",
            totals.waits,
            totals.wait_micros / 1e6,
            at_once=totals.rounds - sum(totals.waits),
        )

    def _labelled(self, totals: SpeculationStats) -> Iterator[Metric]:
        yield labelled(
            CounterMetricFamily,
            "ssd_cache_lookups",
            "Look-ups in the speculation cache.",
            "result",
            {result.value: getattr(totals, name) for result, name in LOOK_UPS.items()},
        )
        accepted = per_position(totals.accepted_lengths)
        accepted += [0] * (self._depth - len(accepted))
        yield labelled(
            CounterMetricFamily,
            "ssd_spec_decode_accepted_tokens_per_pos",
            "Speculated tokens that were right, by their place in the speculation.",
            "position",  # counted from 0, as elsewhere in the field
            {str(position): accepted[position] for position in range(self._depth)},
        )
        sources = ("cache", "just_in_time", "ngram", "sync", "grammar", "plain")
        yield labelled(
            CounterMetricFamily,
            "ssd_rounds",
            "Rounds, by where their speculation came from.",
            "source",
            {source: getattr(totals, f"{source}_rounds") for source in sources},
        )
        yield labelled(
            CounterMetricFamily,
            "ssd_mode_rounds",
            "Rounds, by the mode that they went by.",
            "mode",
            {m.name.lower(): totals.rounds_in(m) for m in (Mode.OFF, Mode.SYNC, Mode.SSD)},
        )
        yield labelled(
            CounterMetricFamily,
            "ssd_fallback_rounds",
            "Rounds without the speculation that was asked for.",
            "reason",
            {reason: totals.fallbacks.get(reason, 0) for reason in FALLBACKS},
        )

    def _link_states(self) -> Iterator[Metric]:
        states = Counter(link.state for link in list(self._links.links.values()))
        yield labelled(
            GaugeMetricFamily,
            "ssd_link_state",
            "Links to endpoints, by their state.",
            "state",
            {state.value: states[state] for state in DraftLinkState},
        )
        yield labelled(
            CounterMetricFamily,
            "ssd_link_failures",
            "Connections to endpoints that failed, or were broken off, by reason.",
            "reason",
            self._links.failures(),
        )
        yield CounterMetricFamily(
            "ssd_link_unknown_frames",
            "Frames that only newer endpoints understand, passed over.",
            value=self._links.unknown(),
        )
        counts = self._links.look_ups()
        yield labelled(
            CounterMetricFamily,
            "ssd_discovery_lookups",
            "Look-ups of names and files of endpoints, by result.",
            "result",
            {result: counts[result] for result in ("found", "empty", "failed")},
        )
        yield GaugeMetricFamily(
            "ssd_discovered_endpoints",
            "Endpoints that names and files gave at their last look-up.",
            value=sum(len(each.places) for each in self._links.discoveries),
        )


class DraftCollector:
    """Drafts by their kind: the one inside the target, and endpoints whose link is up."""

    def __init__(self, links: Links, inside: str | None) -> None:
        self._links, self._inside = links, inside

    def collect(self) -> Iterator[Metric]:
        links = list(self._links.links.values())
        up = Counter(link.report.kind for link in links if link.state is DraftLinkState.UP)
        metric = GaugeMetricFamily(
            "ssd_drafts", "Drafts, by their kind and where they are.", labels=["kind", "place"]
        )
        for kind in KINDS:
            metric.add_metric([kind, "inside"], int(kind == self._inside))
            metric.add_metric([kind, "endpoint"], up[kind])
        yield metric


def _planes(stats: Callable[[], TargetEngineStats | None]) -> list[PlaneLike]:
    latest = stats()
    return [] if latest is None else [each for e in latest.endpoints for each in e.planes]


def _drafts(totals: SpeculationStats) -> int:
    return totals.full_rounds + totals.rejected_rounds


class RequestTimer:
    """Times one request and writes it to the metrics."""

    def __init__(self, metrics: TargetMetrics) -> None:
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
