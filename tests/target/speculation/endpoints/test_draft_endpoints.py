"""What the engine believes of an endpoint."""

from ssd_engine.speculation.frames import Launch, Load, Source
from ssd_target.records.engine_records import DraftLinkUp
from ssd_target.records.speculation_options import Mode, SpeculationOptions
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.endpoint import LOAD_SECONDS, SILENT_VISITS, DraftEndpoint
from ssd_target.speculation.endpoints.payoff import Payoff
from tests.target.sequences import make_sequence
from tests.target.speculation.rounds import end_plain_round


def connected(max_sequences: int) -> DraftEndpoint:
    endpoint = DraftEndpoint(1, Payoff(False))
    endpoint.connect(DraftLinkUp(1, 1, False, max_sequences, 2048, 7))
    return endpoint


def test_sequences_of_other_targets_take_room_for_a_while() -> None:
    endpoint = connected(16)
    endpoint.sequences = {1, 2}
    endpoint.heard(Load(open_sequences=8), now=10.0)
    assert endpoint.occupancy(10.0) == 8 / 16
    endpoint.sequences = {1, 2, 3}
    assert endpoint.occupancy(10.1) == 9 / 16
    endpoint.sequences = set()  # nobody asks it anything, so it says nothing
    assert endpoint.occupancy(10.0 + LOAD_SECONDS) == 0.0


def test_sequences_are_spread_evenly_over_endpoints() -> None:
    options = SpeculationOptions(auto_off=False)
    speculator = SpeculationCoordinator(options, 100, clock=lambda: 0.0)
    for link in (1, 2):
        speculator.endpoints.connected(DraftLinkUp(link, 1, False, 16, 2048, 5))
    sequences = [make_sequence(i, [1, 2], mode=Mode.SSD) for i in range(8)]
    for sequence in sequences:
        speculator.begin(sequence)
        end_plain_round(speculator, sequence)
    speculator.launch(speculator.take(sequences))
    assert [len(endpoint.sequences) for endpoint in speculator.endpoints] == [4, 4]


def visit(endpoint: DraftEndpoint, begin: float) -> None:
    """A short one: a sequence comes and goes."""
    endpoint.say(Launch(1, 1, [], Source.NONE, 5, 0), begin)
    endpoint.left()


def test_an_endpoint_that_answers_none_of_many_short_visits_is_given_up() -> None:
    endpoint = connected(16)
    for number in range(SILENT_VISITS):
        assert not endpoint.is_stalled(9.0, timeout=2.0)
        visit(endpoint, begin=float(number))
    assert not endpoint.is_stalled(1.9, timeout=2.0)
    assert endpoint.is_stalled(2.1, timeout=2.0)


def test_a_visit_may_end_before_it_is_answered() -> None:
    endpoint = connected(16)
    for number in range(3 * SILENT_VISITS):
        visit(endpoint, begin=float(number))
        if number % 2:
            endpoint.heard(None, number + 0.5)
        assert not endpoint.is_stalled(number + 0.9, timeout=2.0)
    assert not endpoint.is_stalled(1e6, timeout=2.0)
