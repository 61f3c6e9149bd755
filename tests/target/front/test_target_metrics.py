"""Metrics of a target that no running pair of the tests shows: drafts of every kind."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from ssd_serving.rpc.speculator_kinds import KINDS, UNKNOWN
from ssd_target.front.metrics import DraftCollector
from ssd_target.links.handshake import TargetIdentity
from ssd_target.links.link_errors import LinkBroken
from ssd_target.links.link_state import DraftLinkState
from ssd_target.links.links import Links

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
