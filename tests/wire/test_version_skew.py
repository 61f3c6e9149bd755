"""Peers one minor version apart work together, in both directions; further apart they say so."""

import re
from functools import partial

import pytest

from ssd.v1 import target_pb2 as pb
from ssd_client.connection.endpoints import connect
from ssd_client.generate.result import GenerationResult, Timing
from ssd_client.generate.stream import generate as client_generate
from tests.speculation.generations import SSD, Pair, endpoint, generate, is_up, request
from tests.waiting import HANG_SECONDS, wait_until
from tests.wire.contracts import next_files, released_files
from tests.wire.skew_proxy import Apart, NextMinor, SkewProxy, Version

VERSIONS = {
    "released": partial(Version, released_files()),
    "next": partial(NextMinor, next_files()),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("of_client", [True, False], ids=["asking", "asked"])
class TestOneVersionApart:
    """The peer of another version is the one that asks: a client, a target; or the one asked."""

    def test_speculation_through_a_link(self, victims: Pair, version: str, of_client: bool) -> None:
        server = victims.draft.process if of_client else victims.target
        before = server.metrics()
        told = len(victims.target.log())  # of others, who may have had the port before
        peer = VERSIONS[version]()
        with SkewProxy(victims.draft.address, peer, of_client) as proxy:
            message = request(0, 40, speculation={"mode": SSD, "endpoints": [proxy.address]})
            wait_until(lambda: self.came_in_time(victims, message))
            wait_until(lambda: is_up(victims.target, proxy.address))
            # A draft that gets no time on a busy machine falls silent, of whatever version it is.
            log = victims.target.log()[told:]
            downs = re.findall(rf"link to {proxy.address} is down: (.*)", log)
            assert {*downs} <= {"rounds stay unanswered", "no answer to hello"}
        assert peer.said["SpeculateRequest" if of_client else "SpeculateResponse"] > 3
        if version == "next":
            name = f"ssd_{'draft' if of_client else 'link'}_unknown_frames_total"
            assert server.metrics()[name] > before[name]

    def came_in_time(self, victims: Pair, message: pb.GenerateRequest) -> int:
        """Rounds for which branches were there, whether one of them was right or not."""
        output = generate(victims.target, message)
        assert [(output.text, output.tokens)] == victims.plain.of([message])
        stats = output.finish.speculation
        return int(stats.hits + stats.length_misses + stats.token_misses)

    def test_a_client_of_the_project(self, victims: Pair, version: str, of_client: bool) -> None:
        message = request(1, 30)
        [(text, tokens)] = victims.plain.of([message])
        before = victims.target.metrics()
        result = GenerationResult(Timing(0.0))
        with (
            SkewProxy(victims.target.address, VERSIONS[version](), of_client) as proxy,
            connect([proxy.address]) as endpoints,
        ):
            for event in client_generate(endpoints, message, timeout_s=HANG_SECONDS):
                result.add(event, 0.0)
            assert endpoints[0].model_info(30).name == "stories-target"
        assert (result.text, list(result.token_ids)) == (text, tokens)
        assert result.finished is not None
        reason = result.finished.reason.value
        assert reason == ("unknown" if version == "next" and not of_client else "length")
        after = victims.target.metrics()
        for name in map('ssd_unknown_values_total{{field="{}"}}'.format, ("mode", "verification")):
            assert after[name] - before[name] == (version == "next" and of_client)


@pytest.mark.parametrize(
    ("version", "of_client", "advice"),
    [
        (Apart(3, 2), True, "upgrade the draft"),
        (Apart(0, 0), True, "upgrade the target"),
        (Apart(3, 2), False, "upgrade the target"),
        (Apart(0, 0), False, "upgrade the endpoint"),
    ],
    ids=["newer target", "older target", "newer draft", "older draft"],
)
def test_further_apart_a_target_says_what_to_upgrade_and_goes_on_without(
    victims: Pair, version: Apart, of_client: bool, advice: str
) -> None:
    with SkewProxy(victims.draft.address, version, of_client) as proxy:
        message = request(2, 10, speculation={"mode": SSD, "endpoints": [proxy.address]})
        [(_, plain)] = victims.plain.of([message])

        def reason() -> str:
            found = endpoint(victims.target, proxy.address)
            return "" if found is None or found.state != "refused" else found.reason

        assert generate(victims.target, message).tokens == plain
        # Somebody else may have been refused at this port before.
        wait_until(lambda: advice in reason(), reason)
