"""How many outcomes are prepared for, and how deep, in the time of the target's forward."""

import pytest

from ssd_draft.planning import plan as plan_module
from ssd_draft.planning.plan import FILL, Planner
from ssd_draft.planning.sequence import DraftSequence
from ssd_engine.speculation.frames import Launch, Outcome, Source
from ssd_engine.speculation.latency_model import StepClock
from tests.draft.told_draft import opened

DEPTH, CHAIN, STEP = 4, 3, 0.001
ROUNDS = 400


def verifying(seconds: float) -> DraftSequence:
    """A sequence whose round has a chain, and takes so long."""
    sequence = DraftSequence(1, opened(depth=DEPTH), 0.0, DEPTH)
    assert sequence.apply(Outcome(1, 0, 0, 3), 0.0)
    launch = Launch(1, 1, [4] * CHAIN, Source.CACHE, DEPTH, int(seconds * 1e6))
    assert sequence.apply(launch, 0.0)
    return sequence


@pytest.mark.parametrize("lists", [(), ((2,), (2,))], ids=["measured", "given"])
@pytest.mark.parametrize(("spare", "patient"), [(-0.1, False), (0.1, True)])
def test_a_chain_is_read_token_by_token_where_the_whole_tree_is_in_time_all_the_same(
    spare: float, patient: bool, lists: tuple[tuple[int, ...], ...]
) -> None:
    clock, planner = StepClock(), Planner(DEPTH, 8, *lists)
    sequence = verifying((1 + CHAIN + DEPTH + spare) * STEP / FILL)
    assert not planner.plan(sequence, clock, 0).patient  # nothing is known of steps
    clock.observe(8, STEP)
    plan = planner.plan(sequence, clock, 0)
    assert plan.patient is patient
    assert plan.depth == DEPTH
    assert sum(plan.fan_out) == 8


def test_a_fan_out_is_kept_while_rates_hardly_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first every round changes it; what has changed for good is followed soon."""
    computed, compute = [], plan_module.fan_out
    monkeypatch.setattr(
        plan_module, "fan_out", lambda *args, **most: computed.append(0) or compute(*args, **most)
    )
    planner, clock, sequence = Planner(DEPTH, 8), StepClock(), verifying(1.0)

    def rounds(accepted: int) -> list[int]:
        for _ in range(ROUNDS):
            planner.observe(sequence, accepted, 0, 16)
            plan = planner.plan(sequence, clock, 0)
        return plan.fan_out

    first = rounds(accepted=0)
    assert first[0] > first[CHAIN]
    assert 8 <= len(computed) <= ROUNDS // 4
    then = rounds(accepted=CHAIN)
    assert then[0] < then[CHAIN]
