"""Requests with every option, whose tokens a device draws: the same text in every mode.

The device is interpreted; it draws by the kernels of a real one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ssd_engine.execution import graphs
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
from tests.harness import BLOCK, Request, Result, make_core, make_runner, run
from tests.random_models import make_model

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter", "emulated"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted"),
]

CPU = torch.device("cpu")
DEPTH, VOCAB, TOKENS = 2, 512, 4
SHAPE = StepShape(rows=9, runs=3, rows_per_run=DEPTH + 1, max_positions=160, block_size=BLOCK)
PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=2.0)
BIAS = tuple((token, 6.0) for token in range(20, 30))


class Event:
    """Of a device that is done when it is looked at for the second time."""

    def __init__(self, **_: object) -> None:
        self._looks = 0

    def record(self, *_: object) -> None:
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.torch.cuda, "Event", Event)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda: None)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("model")
    make_model("llama3-untied", directory)
    runner = make_runner(directory, kernels="torch")
    del runner.model.weights.layers[1:], runner.kv.layers[1:]
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


def make_requests(mode: Mode, verification: Verification = Verification.COUPLED) -> list[Request]:
    options: list[tuple[dict[str, Any], int | None]] = [
        (dict(temperature=0.0, logit_bias=BIAS, **PENALTIES), 2),
        (dict(temperature=0.9, top_p=0.9, logit_bias=BIAS, **PENALTIES), None),
        (dict(temperature=0.7, top_k=8, repetition_penalty=0.8), 0),
    ]
    return [
        Request(
            [5 + i, 21, 22, 40 + i],
            SamplingParams(seed=i, **told),
            max_tokens=TOKENS,
            num_logprobs=num_logprobs,
            speculation=SpeculationRequest(mode, verification, depth=DEPTH),
        )
        for i, (told, num_logprobs) in enumerate(options)
    ]


def run_on_device(
    runner: ModelRunner, drafter: HalfRight | None, requests: list[Request] | None = None
) -> list[Result]:
    histories = Histories(SHAPE.runs, SHAPE.rows, runner.config.head_rows, CPU)
    last = torch.zeros(SHAPE.rows, dtype=torch.int32)
    step = Step(runner.model, runner.kv, SHAPE, 1, last=last, num_sides=2, histories=histories)
    step.inputs.clear(runner.dummy_slot)
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False)
    speculator = SpeculationCoordinator(options, runner.config.vocab_size, drafter=drafter)  # type: ignore[arg-type]
    rejector = Rejector(SHAPE.runs, SHAPE.rows, DEPTH + 1, runner.config.head_rows, CPU)
    runner.steps = GraphRunner([step], eager=True, rejector=rejector)
    runner._drawing = PromptDrawing(2, runner.config.head_rows, CPU, False, histories)
    try:
        core = make_core(runner, speculator=speculator)
        mode = Mode.OFF if drafter is None else Mode.SYNC
        return run(core, requests or make_requests(mode))
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
        assert other.speculation is not None
        assert 0 < other.speculation.accepted_tokens < other.speculation.drafted_tokens
    assert [len(result.logprobs) for result in plain] == [TOKENS, 0, TOKENS]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lanes that are masked are computed, too
def test_rounds_are_verified_by_rejection_where_the_logits_are(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(Mode.SYNC, Verification.REJECTION)
    drafter = Shipping(run(make_core(runner), make_requests(Mode.OFF)))
    options = SpeculationOptions(depth=DEPTH, adapt_depth=False)
    speculator = SpeculationCoordinator(options, runner.config.vocab_size, drafter=drafter)  # type: ignore[arg-type]
    on_host = run(make_core(runner, speculator=speculator), requests)
    monkeypatch.delattr(InFlight, "_logits")  # nobody looks at them
    on_device = run_on_device(runner, drafter, requests)
    for one, other in zip(on_host, on_device, strict=True):
        assert other.tokens == one.tokens
        assert [each.chosen for each in other.logprobs] == pytest.approx(
            [each.chosen for each in one.logprobs], abs=1e-4
        )
        assert other.speculation is not None
        assert other.speculation.rejection_rounds > 0
    assert sum(result.speculation.accepted_tokens for result in on_device if result.speculation) > 0


def test_a_step_follows_what_the_one_before_it_draws(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word from the host, which has not seen it."""
    requests = [
        Request(
            [5 + i, 21, 22, 40 + i],
            SamplingParams(seed=i, **told),
            max_tokens=4,
            num_logprobs=num_logprobs,
            speculation=SpeculationRequest(Mode.OFF),
        )
        for i, (told, num_logprobs) in enumerate([({"temperature": 0.8}, None), ({}, 2)])
    ]
    on_host = run(make_core(runner), requests)
    launch, unknown = GraphRunner.launch, []

    def seen(self: GraphRunner, parts: Any, *rest: Any) -> InFlight | None:
        unknown.append(sum(token < 0 for part in parts for token in part.tokens))
        return launch(self, parts, *rest)

    monkeypatch.setattr(GraphRunner, "launch", seen)
    on_device = run_on_device(runner, None, requests)
    assert [result.tokens for result in on_device] == [result.tokens for result in on_host]
    assert [len(result.logprobs) for result in on_device] == [0, 4]
    # The prompt draws the first token; the second is of a step whose tokens the host knows.
    assert unknown == [0, 2, 2]
