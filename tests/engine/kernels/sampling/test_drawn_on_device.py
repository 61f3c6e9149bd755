"""Requests with every option, whose tokens a device draws: the same text in every mode.

The device is interpreted; it draws by the kernels of a real one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ssd_engine.execution.graphs import GraphRunner, InFlight
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.execution.step_drawing import PromptDrawing
from ssd_engine.forward.step_inputs import StepShape
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.kernels.sampling.rejecting import Rejector
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import to_wire
from ssd_engine.speculation.frames import Verification
from ssd_target.records.speculation_options import Mode, SpeculationOptions, SpeculationRequest
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.sync_drafter import DraftRow
from tests.engine.execution.emulated_device import Event, emulate, small_runner
from tests.harness import BLOCK, Request, Result, make_core, run

pytestmark = pytest.mark.usefixtures("quick_interpreter")

CPU = torch.device("cpu")
DEPTH, VOCAB, TOKENS = 2, 512, 4
SHAPE = StepShape(rows=9, runs=3, rows_per_run=DEPTH + 1, max_positions=160, block_size=BLOCK)
PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=2.0)
BIAS = tuple((token, 6.0) for token in range(20, 30))


class SlowEvent(Event):
    """Of a device that is done when it is looked at for the second time."""

    looks = 0

    def record(self, *_: object) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 1


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, SlowEvent)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    runner = small_runner(tmp_path_factory.mktemp("model"), layers=1)
    runner.num_blocks -= 1
    runner._set_dummy(runner.num_blocks)
    return runner


class HalfRight:
    """Knows the texts; every third token that it drafts is another one."""

    reads_features = False

    def __init__(self, results: Sequence[Result]) -> None:
        self._texts = [result.tokens for result in results]

    def draft(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            at = len(row.sequence.output)
            text = self._texts[row.sequence.id][at : at + row.depth]
            row.tokens += [
                (token + 1) % VOCAB if (at + i) % 3 == 2 else token for i, token in enumerate(text)
            ]

    def is_behind(self, sequence: Any) -> bool:
        return False

    def end(self, sequence_id: int) -> None: ...

    def check_integrity(self) -> None: ...


class Shipping(HalfRight):
    """Says that a token was drawn from a distribution over it and a few others."""

    def draft(self, rows: Sequence[DraftRow]) -> None:
        super().draft(rows)
        for row in rows:
            for token in row.tokens:
                q = torch.zeros(VOCAB, dtype=torch.float64)
                q[20:28] += 0.05
                q[token] += 0.6
                row.wires.append(to_wire(q[None]))


# Sampling options, and a number of log probabilities.
EVERYTHING: list[tuple[dict[str, Any], int | None]] = [
    (dict(temperature=0.0, logit_bias=BIAS, **PENALTIES), 2),
    (dict(temperature=0.9, top_p=0.9, logit_bias=BIAS, **PENALTIES), None),
    (dict(temperature=0.7, top_k=8, repetition_penalty=0.8), 0),
]


def make_requests(mode: Mode, verification: Verification = Verification.COUPLED) -> list[Request]:
    return [
        Request(
            [5 + i, 21, 22, 40 + i],
            SamplingParams(seed=i, **told),
            max_tokens=TOKENS,
            num_logprobs=num_logprobs,
            speculation=SpeculationRequest(mode, verification, depth=DEPTH),
        )
        for i, (told, num_logprobs) in enumerate(EVERYTHING)
    ]


def make_speculator(drafter: Any) -> SpeculationCoordinator:
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False)
    return SpeculationCoordinator(options, VOCAB, drafter=drafter)


def run_on_device(
    runner: ModelRunner, drafter: HalfRight | None, requests: list[Request] | None = None
) -> list[Result]:
    histories = Histories(SHAPE.runs, SHAPE.rows, runner.config.head_rows, CPU)
    last = torch.zeros(SHAPE.rows, dtype=torch.int32)
    step = Step(runner.model, runner.kv, SHAPE, 1, last=last, num_sides=2, histories=histories)
    step.inputs.clear(runner.dummy_slot)
    speculator = make_speculator(drafter)
    rejector = Rejector(SHAPE.runs, SHAPE.rows, DEPTH + 1, runner.config.head_rows, CPU)
    runner.steps = GraphRunner([step], eager=True, rejector=rejector)
    runner._drawing = PromptDrawing(2, runner.config.head_rows, CPU, False, histories)
    try:
        default = make_requests(Mode.OFF if drafter is None else Mode.SYNC)
        return run(make_core(runner, speculator=speculator), requests or default)
    finally:
        runner.steps = runner._drawing = None


def test_texts_are_the_same_wherever_and_however_they_are_drawn(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = run(make_core(runner), make_requests(Mode.OFF))
    monkeypatch.delattr(InFlight, "_logits")  # nobody looks at them
    plain = run_on_device(runner, None)
    speculated = run_on_device(runner, HalfRight(on_host))
    assert [result.tokens for result in plain] == [result.tokens for result in on_host]
    for one, other in zip(plain, speculated, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == one.logprobs
        assert 0 < other.speculation.accepted_tokens < other.speculation.drafted_tokens
    assert [len(result.logprobs) for result in plain] == [TOKENS, 0, TOKENS]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lanes that are masked are computed, too
def test_rounds_are_verified_by_rejection_where_the_logits_are(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Mode.SYNC, Verification.REJECTION)
    drafter = Shipping(run(make_core(runner), make_requests(Mode.OFF)))
    on_host = run(make_core(runner, speculator=make_speculator(drafter)), requests)
    monkeypatch.delattr(InFlight, "_logits")  # nobody looks at them
    on_device = run_on_device(runner, drafter, requests)
    for one, other in zip(on_host, on_device, strict=True):
        assert other.tokens == one.tokens
        assert [each.chosen for each in other.logprobs] == pytest.approx(
            [each.chosen for each in one.logprobs], abs=1e-4
        )
        assert other.speculation.rejection_rounds > 0
    assert sum(result.speculation.accepted_tokens for result in on_device if result.speculation) > 0
