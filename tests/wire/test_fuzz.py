"""Every method of every service, attacked with what its descriptor allows and what it does not."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.processes import link_states, wait_until_idle
from tests.speculation.generations import (
    Pair,
    draft_info,
    generate,
    is_empty,
    request,
)
from tests.suite.scale import share
from tests.waiting import wait_until
from tests.wire.attack import Call, attack, calls, shown
from tests.wire.rpcs import offered, valid_requests

MESSAGE = request(5, 40)
EXAMPLES = 360  # of each role: a call of each method, of some several
SERVICES = {
    "target": {
        "ssd.v1.TargetService",
        "ssd.v1.TraceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    },
    "draft": {
        "ssd.v1.SpeculationService",
        "ssd.v1.TraceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    },
}


@pytest.mark.parametrize("role", SERVICES)
def test_nothing_that_a_client_sends_harms_a_service(victims: Pair, role: str) -> None:
    """The same calls in every run: a failure can be looked at again."""
    process = victims.target if role == "target" else victims.draft.process
    rpcs = offered(process)
    assert {rpc.path.split("/")[1] for rpc in rpcs} == SERVICES[role]
    [plain] = victims.plain.of([MESSAGE])
    drawn: list[Call] = []

    @settings(
        max_examples=share(EXAMPLES),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(rpcs, valid_requests(draft_info(victims.draft.process))))
    def draw(several: tuple[Call, ...]) -> None:
        drawn.extend(several)

    draw()
    ends = asyncio.run(attack(process.address, drawn))
    print(f"{role}:\n{shown(ends)}")
    assert {end.call.rpc.path for end in ends} == {rpc.path for rpc in rpcs}
    assert not [end for end in ends if end.is_wrong][:3]
    check_serves_as_before(victims, plain)


def check_serves_as_before(pair: Pair, plain: tuple[str, list[int]]) -> None:
    """Both of them, and hold nothing."""
    wait_until_idle(pair.target)
    wait_until(lambda: is_empty(pair.draft.process))
    wait_until(lambda: pair.draft.process.metrics()['ssd_draft_links{state="greeting"}'] == 0)
    wait_until(lambda: "up" in link_states(pair.target))
    output = generate(pair.target, MESSAGE)
    assert (output.text, output.tokens) == plain
    for process in (pair.target, pair.draft.process):
        assert process.process.poll() is None, process.log()[-4000:]
        assert "Traceback" not in process.log(), process.log()[-4000:]
