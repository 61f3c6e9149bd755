"""Metrics of a target that no running pair of the tests shows: drafts of every kind."""

import asyncio

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

ADDRESSES = tuple(f"127.0.0.1:{port}" for port in range(1, 6))


def counts(collector: DraftCollector) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(collector)
    (family,) = registry.collect()
    return {(s.labels["kind"], s.labels["place"]): s.value for s in family.samples}


@pytest.mark.parametrize("inside", ["model", "head", None])
def test_drafts_are_counted_by_kind_and_place(inside: str | None) -> None:
    async def scenario() -> dict[tuple[str, str], float]:
        links = Links(ADDRESSES, [], [], lambda record: None, lambda: 0)
        links.start(TargetIdentity("t", "f", 10, 3, None))
        for link, kind in zip(links.links.values(), ("head", "head", "ngram", UNKNOWN, "model"),
                              strict=True):  # fmt: skip
            link.report.up("a draft", kind)
            link.state = DraftLinkState.UP
        link.report.down(LinkBroken("silent", "gone"))  # the last one
        link.state = DraftLinkState.WAITING
        found = counts(DraftCollector(links, inside))
        await links.stop()
        return found

    found = asyncio.run(scenario())
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
        name: registry.get_sample_value(name)
        for name in (
            "ssd_feature_rows_total",
            "ssd_feature_bytes_total",
            "ssd_feature_rows_missed_total",
            "ssd_feature_rows_reread_total",
            "ssd_feature_requests_total",
            "ssd_feature_requests_refused_total",
            "ssd_kept_features_bytes",
        )
    }
    assert list(found.values()) == [7, 7 * 96, 2, 3, 5, 4, 1024]
    kinds = {kind: {"stream": "features", "kind": kind} for kind in ("nccl", "tcp")}
    up = {kind: registry.get_sample_value("ssd_planes", labels) for kind, labels in kinds.items()}
    assert up == {"nccl": 1, "tcp": 0}
