"""Rounds of a target's speculation, as tests need them."""

from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import RoundOutcome
from ssd_target.speculation.coordinator import SpeculationCoordinator


def end_plain_round(speculator: SpeculationCoordinator, sequence: Sequence) -> None:
    """One in which nothing was guessed, and 7 drawn."""
    sequence.commit(7)
    speculator.end_round(sequence, RoundOutcome(range(0), [7], None), 1)
