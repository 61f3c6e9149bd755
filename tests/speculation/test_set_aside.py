"""More requests than the KV cache holds: all end, each with the text that it has alone."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.frames import Verification
from ssd_target.engine.core import EngineCore
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from tests.harness import BLOCK, Request, make_core, make_runner, run
from tests.simulation import FewBlocks, Simulation
from tests.suite.scale import full_only

PROMPT, DEPTH = 5, 3


@dataclass(frozen=True)
class Case:
    requests: int
    context: int
    contexts: int  # whole ones, that the target has room for
    set_aside: int  # at least


CASES = [pytest.param(Case(10, 80, 2, 3)), full_only(Case(64, 192, 8, 20))]


@pytest.fixture(scope="module")
def runners() -> list[ModelRunner]:
    return [make_runner(resolve_model(f"stories-{kind}"), 2048) for kind in ("target", "draft")]


def requests(mode: Mode, case: Case) -> list[Request]:
    """Each may fill its context, and ends where the model ends it."""
    return [
        Request(
            [0, 5 + i, 40 + 3 * i, 7, 300 + i],
            SamplingParams(i, 1.0 if i % 4 else 0.0),
            case.context - PROMPT,
            frozenset([1]),
            speculation=SpeculationRequest(mode, Verification.COUPLED, DEPTH),
        )
        for i in range(case.requests)
    ]


def watched(core: EngineCore) -> Counter[int]:
    """How often each sequence is set aside from now on."""
    seen: Counter[int] = Counter()
    plan = core.scheduler.plan

    def planned() -> Any:
        made = plan()
        seen.update(sequence.id for sequence in made.set_aside)
        return made

    core.scheduler.plan = planned  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SYNC, Mode.SSD])
def test_all_end_with_the_text_that_each_has_alone(
    mode: Mode, case: Case, runners: list[ModelRunner]
) -> None:
    """The draft has room for half as much."""
    alone = run(make_core(runners[0]), requests(Mode.OFF, case))
    room = case.contexts * case.context // BLOCK
    target, draft = FewBlocks(runners[0], room), FewBlocks(runners[1], room // 2)
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False, auto_off=False)
    simulation = Simulation(target, draft, options, sync=mode is Mode.SYNC, budget=2)  # type: ignore[arg-type]
    seen = watched(simulation.core)
    results = run(simulation.core, requests(mode, case))
    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert seen.total() >= case.set_aside
    assert case.requests < 64 or mode is Mode.SYNC or max(seen.values()) >= 2
    assert simulation.core.stats().set_aside == seen.total()
    if mode is Mode.SSD:
        counters = simulation.drafts[0].core.counters
        assert counters.evictions + counters.refusals > 0
    if mode is not Mode.OFF:
        assert sum(r.speculation.accepted_tokens for r in results if r.speculation) > 20
