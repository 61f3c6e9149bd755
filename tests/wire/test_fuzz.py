"""Every method of every service, attacked with what its descriptor allows and what it does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.processes import ServiceProcess, link_states, wait_until_idle
from tests.speculation.generations import (
    Pair,
    draft_info,
    generate,
    is_empty,
    request,
)
from tests.suite.scale import FULL
from tests.waiting import wait_until
from tests.wire.attack import Attacker, Call, calls
from tests.wire.rpcs import offered, valid_requests

MESSAGES = 20_000 if FULL else 500  # malformed or extreme, in all
EXAMPLES = 2.4  # calls for each of them: some are valid, empty, or never sent
CALLS_OF_AN_EXAMPLE = 8  # at least
PROCESSES = 2
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


@contextmanager
def unharmed(pair: Pair) -> Iterator[None]:
    """Whatever happens inside: afterwards both serve as before, and hold nothing."""
    message = request(5, 40)
    [plain] = pair.plain.of([message])
    yield
    for process in (pair.target, pair.draft.process):
        assert process.process.poll() is None, process.log()[-4000:]
    wait_until_idle(pair.target)
    wait_until(lambda: is_empty(pair.draft.process))
    wait_until(lambda: pair.draft.process.metrics()['ssd_draft_links{state="greeting"}'] == 0)
    wait_until(lambda: "up" in link_states(pair.target))
    output = generate(pair.target, message)
    assert (output.text, output.tokens) == plain
    for process in (pair.target, pair.draft.process):
        assert "Traceback" not in process.log(), process.log()[-4000:]


def attack(
    process: ServiceProcess,
    strategy: st.SearchStrategy[Any],
    messages: int,
    valid: frozenset[bytes],
) -> Attacker:
    """The same calls in every run: a failure can be looked at again."""

    with Attacker(process.address, valid) as attacker:

        @settings(
            max_examples=int(EXAMPLES * messages) // CALLS_OF_AN_EXAMPLE,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def work(several: tuple[Call, ...]) -> None:
            attacker.attack(several)

        # On a busy machine some calls are over before they are sent.
        while sum(attacker.tally.messages.values()) < messages:
            work()
            attacker.finish()
    return attacker


@pytest.mark.parametrize("role", SERVICES)
def test_nothing_that_a_client_sends_harms_a_service(
    victims: Pair, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = victims.target if role == "target" else victims.draft.process
    rpcs = offered(process)
    assert {rpc.path.split("/")[1] for rpc in rpcs} == SERVICES[role]
    messages = MESSAGES // PROCESSES
    with unharmed(victims):
        honest = valid_requests(draft_info(victims.draft.process))
        valid = frozenset(message for each in honest.values() for message in each)
        tally = attack(process, calls(rpcs, honest), messages, valid).tally
    with capsys.disabled():
        print(f"\n{role}: {tally}")
    assert {path for path, _ in tally.ends} == {rpc.path for rpc in rpcs}
    assert not tally.wrong, tally.wrong[:3]
