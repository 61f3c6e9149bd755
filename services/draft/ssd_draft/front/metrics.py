"""Prometheus metrics of a draft. Their prefix is ``ssd_draft_``, unless a target has them, too."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from prometheus_client.core import Metric

from ssd_draft.front.link import TargetLinkState
from ssd_draft.records import DraftEngineStats
from ssd_serving.observability.metrics import Reads, ServiceMetrics, histogram_family
from ssd_serving.observability.plane_metrics import PlaneCollector, PlaneLike
from ssd_serving.rpc.speculator_kinds import KINDS

LIVE = (TargetLinkState.GREETING, TargetLinkState.UP, TargetLinkState.LEAVING)


class DraftMetrics(ServiceMetrics):
    def __init__(
        self,
        stats: Callable[[], DraftEngineStats | None],
        num_blocks: Callable[[], int],
        num_links: Callable[[TargetLinkState], int],
    ) -> None:
        super().__init__("draft", stats)
        links = self.gauge("ssd_draft_links", "Links by state.", ["state"])
        for state in LIVE:
            links.labels(state.value).set_function(partial(num_links, state))
        self.handshake_failures = self.counter(
            "ssd_draft_handshake_failures", "Links that did not come up, by reason.", ["reason"]
        )
        self.links_ended = self.counter(
            "ssd_draft_links_ended", "Links that were up and ended, by how.", ["how"]
        )
        self.frames_received = self.counter("ssd_draft_frames_received", "Frames of targets.")
        self.frames_sent = self.counter("ssd_draft_frames_sent", "Frames to targets.")
        self.frames_dropped = self.counter(
            "ssd_draft_frames_dropped",
            "Frames that the front dropped: of another epoch, or to a slow reader.",
            ["reason"],
        )
        self.frames_unknown = self.counter(
            "ssd_draft_unknown_frames",
            "Frames of newer targets that were passed over, or understood in part.",
        )
        self._kind = self.gauge("ssd_draft_info", "1 for the kind of this draft.", ["kind"])
        self.show_kind(None)
        self.engine_gauges(_gauges(num_blocks))
        self.engine_counters(COUNTERS)
        self.registry.register(BuildCollector(stats))
        self.registry.register(PlaneCollector("ssd_draft_planes", partial(_planes, stats)))

    def show_kind(self, kind: str | None) -> None:
        """``kind``: a name of KINDS; None while the draft loads."""
        for each in KINDS:
            self._kind.labels(each).set(each == kind)


class BuildCollector:
    """How long trees take, as the engine counts it."""

    def __init__(self, stats: Callable[[], DraftEngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield histogram_family(
            "ssd_draft_build_seconds",
            "From the launch of a round to its tree being complete, where it came to that.",
            [] if stats is None else stats.builds,
            0.0 if stats is None else stats.build_micros / 1e6,
        )


def _planes(stats: Callable[[], DraftEngineStats | None]) -> Sequence[PlaneLike]:
    latest = stats()
    return () if latest is None else latest.planes


def _gauges(num_blocks: Callable[[], int]) -> Reads:
    return {
        "ssd_sequences_active": ("Sequences that are open.", lambda s: s.sequences),
        "ssd_draft_kv_cache_usage_ratio": (
            "KV blocks in use, of all.",
            lambda s: s.used_blocks / max(1, num_blocks()),
        ),
        "ssd_draft_kv_cache_reserved_blocks": (
            "KV blocks that open sequences may still take.",
            lambda s: s.reserved_blocks,
        ),
        "ssd_draft_prefix_cache_blocks": (
            "KV blocks in the prefix cache.",
            lambda s: s.cached_blocks,
        ),
    }


COUNTERS: Reads = {
    f"ssd_draft_{name}": (text, attrgetter(field))
    for name, field, text in (
        ("engine_steps", "steps", "Forwards of the engine."),
        ("engine_rows", "rows", "Token rows computed."),
        ("branches", "branches", "Branches begun."),
        ("branch_tokens", "branch_tokens", "Tokens of branches that were pushed."),
        ("rounds", "rounds", "Rounds launched by targets."),
        ("evictions", "evictions", "Sequences that had to make room for others."),
        ("refusals", "refusals", "Sequences that were not opened."),
        ("feature_rows", "feature_rows", "Rows of hidden states that targets have told."),
        ("feature_rows_dropped", "dropped_features", "Such rows that were of no use."),
        ("feature_rounds", "feature_rounds", "Rounds that a head followed."),
        (
            "feature_rounds_late",
            "late_feature_rounds",
            "Of these, whose hidden states had not come with the next outcome.",
        ),
        ("engine_frames_dropped", "dropped_frames", "Frames that were stale or unknown."),
    )
}
