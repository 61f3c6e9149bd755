"""A pair that is grown to two vocabularies speculates as the shipped one does."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.speculation.verification import Verification
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from tests.harness import Request, make_runner, submit
from tests.simulation import Simulation
from tests.suite.scale import full_only

SAMPLINGS = [
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=0.8),
    SamplingParams(seed=3, temperature=1.0, top_p=0.9),
    SamplingParams(seed=4, temperature=1.0, top_k=3),
    SamplingParams(seed=5, temperature=1.0, repetition_penalty=1.2),
]
Pair = tuple[ModelRunner, ModelRunner]


def grow(runner: ModelRunner, shape: ModelShape) -> ModelRunner:
    options = replace(runner.options, expand_to=shape)
    return ModelRunner(load_model_config(options.directory), options, SingleRank())


@pytest.fixture(scope="module")
def shipped() -> Pair:
    target, draft = (make_runner(resolve_model(f"stories-{name}")) for name in ("target", "draft"))
    return target, draft


@pytest.fixture(
    scope="module", params=[(4200, 5000), full_only((5000, 4200))], ids=["draft", "target"]
)
def grown(request: pytest.FixtureRequest, shipped: Pair) -> Pair:
    """The named one has the larger vocabulary."""
    (target, draft), (target_vocab, draft_vocab) = shipped, request.param
    return (
        grow(target, ModelShape(hidden=260, vocab=target_vocab)),
        grow(draft, ModelShape(hidden=132, vocab=draft_vocab)),
    )


def texts(pair: Pair, mode: Mode, verification: Verification) -> list[list[int]]:
    options = SpeculationOptions(depth=3, adapt_depth=False, auto_off=False)
    sim = Simulation(*pair, options, sync=True, trusted=True)
    texts: list[list[int]] = [[] for _ in SAMPLINGS]
    speculation = SpeculationRequest(mode, verification, depth=3)
    with patch("ssd_engine.forward.result.time", SimpleNamespace(monotonic=lambda: sim.now)):
        for i, sampling in enumerate(SAMPLINGS):
            request = Request(list(range(300, 320)), sampling, 24, speculation=speculation)
            sim.core.handle(submit(i, request))
        while sim.core.has_work:
            for delta in sim.core.step().deltas:
                texts[delta.sequence] += delta.tokens
            sim.core.check_integrity()
    assert sim.speculator.totals.accepted_tokens > 20
    return texts


@pytest.mark.parametrize(
    ("mode", "verification"),
    [
        full_only(Mode.SSD, Verification.COUPLED),
        full_only(Mode.SSD, Verification.REJECTION),
        full_only(Mode.SYNC, Verification.COUPLED),
        (Mode.SYNC, Verification.REJECTION),
    ],
    ids=["ssd-coupled", "ssd-rejection", "sync-coupled", "sync-rejection"],
)
def test_a_grown_pair_speculates_as_the_shipped_one_does(
    shipped: Pair, grown: Pair, mode: Mode, verification: Verification
) -> None:
    assert texts(grown, mode, verification) == texts(shipped, mode, verification)
