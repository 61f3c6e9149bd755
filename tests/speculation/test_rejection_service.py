"""Rejection verification between real services: distributions travel on the plane of a link."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssd.v1 import target_pb2 as pb
from tests.processes import PATIENT, DraftProcess, Output, TargetProcess, draft, target
from tests.speculation.generations import SSD, generate, is_up, request
from tests.waiting import wait_until
from tests.wire.skew_proxy import Released, SkewProxy

REFUSAL = "the peer declares no draft_distributions, or speaks another version of it"


class SpeaksAsReleased(Released):
    """It answers as the released version does, to a target that speaks as it is."""

    def hears(self, name: str, data: bytes) -> Iterator[bytes]:
        yield data


@dataclass
class Proxied:
    """A target that trusts one draft under three names, two of which are of another version."""

    target: TargetProcess
    draft: DraftProcess
    as_older_target: SkewProxy
    as_older_draft: SkewProxy

    def rejecting(self, address: str) -> Output:
        wait_until(lambda: is_up(self.target, address))
        speculation = {
            "mode": SSD,
            "verification": pb.VERIFICATION_MODE_REJECTION,
            "endpoints": [address],
        }
        return generate(self.target, request(1, 40, speculation=speculation))


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder: Path = tmp_path_factory.mktemp("rejection")
    with (
        draft(folder / "draft") as endpoint,
        SkewProxy(endpoint.address, Released(), of_client=True) as older_target,
        SkewProxy(endpoint.address, SpeaksAsReleased(), of_client=False) as older_draft,
    ):
        addresses = (endpoint.address, older_target.address, older_draft.address)
        flags = [part for each in addresses for part in ("--draft", each, "--trust-draft", each)]
        with target(folder / "target", *flags, *PATIENT, "--no-auto-off") as server:
            yield Proxied(server, endpoint, older_target, older_draft)


def test_what_the_draft_drew_from_reaches_the_target(services: Proxied) -> None:
    def rejects() -> bool:
        stats = services.rejecting(services.draft.address).finish.speculation
        return stats.rejection_rounds > 0 and stats.accepted_tokens > 0

    wait_until(rejects)
    assert f"no tensor plane with {services.draft.address}" not in services.target.log()


def test_a_peer_whose_planes_are_of_another_version_is_served_without(services: Proxied) -> None:
    """It declares no rows: the log says so, and its rounds are coupled."""
    for proxy, server in (
        (services.as_older_target, services.draft),
        (services.as_older_draft, services.target),
    ):
        stats = services.rejecting(proxy.address).finish.speculation
        assert stats.rejection_rounds == 0
        wait_until(lambda server=server: REFUSAL in server.log(), server.log)  # type: ignore[misc]
