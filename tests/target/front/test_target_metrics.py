"""Metrics of a target that no running pair of the tests shows: drafts of every kind."""

import pytest
from prometheus_client import CollectorRegistry

from ssd_engine.tensor_plane.protocol.report import PlaneReport
from ssd_serving.rpc.speculator_kinds import KINDS, UNKNOWN
from ssd_target.front.metrics import DraftCollector, TargetMetrics
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link_errors import LinkBroken
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links
from ssd_target.records.engine_records import EndpointStats, TargetEngineStats
from ssd_target.records.speculation_stats import SpeculationStats
from tests.event_loop import on_event_loop

ADDRESSES = tuple(f"127.0.0.1:{port}" for port in range(1, 6))


def counts(collector: DraftCollector) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    (family,) = registry.collect()
    return {(s.labels["kind"], s.labels["place"]): s.value for s in family.samples}


@pytest.mark.parametrize("inside", ["model", "head", None])
@on_event_loop
async def test_drafts_are_counted_by_kind_and_place(inside: str | None) -> None:
    links = Links(ADDRESSES, [], [], lambda record: None, lambda: 0)
    links.start(TargetIdentity("t", "f", 10, 3, None))
    kinds = ("head", "head", "ngram", UNKNOWN, "model")
    for link, kind in zip(links.links.values(), kinds, strict=True):
        link.report.up("a draft", kind)
        link.state = DraftLinkState.UP
    link.report.down(LinkBroken("silent", "gone"))
    link.state = DraftLinkState.WAITING
    found = counts(DraftCollector(links, inside))
    await links.stop()
    assert found.keys() == {(kind, place) for kind in KINDS for place in ("inside", "endpoint")}
    there = {("head", "endpoint"): 2, ("ngram", "endpoint"): 1, (UNKNOWN, "endpoint"): 1}
    if inside is not None:
        there[inside, "inside"] = 1
    assert {at: count for at, count in found.items() if count} == there


def test_features_and_planes_are_those_of_the_engine() -> None:
    report = PlaneReport("features", "nccl", "up", 7, 7 * 96, 0)
    broken = PlaneReport("features", "tcp", "broken", 0, 0, 0)
    stats = TargetEngineStats(
        *[0] * 15,
        SpeculationStats(),
        0,
        [EndpointStats(0, 1, "on", 0.5, (report,)), EndpointStats(1, 0, "on", 0.5, (broken,))],
        feature_rows=7,
        feature_bytes=7 * 96,
        missed_features=2,
        reread_features=3,
        feature_requests=5,
        refused_feature_requests=4,
        kept_feature_bytes=1024,
    )
    links = Links((), [], [], lambda record: None, lambda: 0)
    registry = TargetMetrics(lambda: stats, lambda: 1, links, 5).registry
    found = {
        "ssd_feature_rows_total": 7,
        "ssd_feature_bytes_total": 7 * 96,
        "ssd_feature_rows_missed_total": 2,
        "ssd_feature_rows_reread_total": 3,
        "ssd_feature_requests_total": 5,
        "ssd_feature_requests_refused_total": 4,
        "ssd_kept_features_bytes": 1024,
    }
    assert found == {name: registry.get_sample_value(name) for name in found}
    kinds = {kind: {"stream": "features", "kind": kind} for kind in ("nccl", "tcp")}
    up = {kind: registry.get_sample_value("ssd_planes", labels) for kind, labels in kinds.items()}
    assert up == {"nccl": 1, "tcp": 0}
