"""The kernels of a CUDA device, interpreted where there is none: steps of few rows."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.execution import step
from ssd_engine.execution.device_layer_ops import FusedOps
from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, Draw, Drawing, Part, drawing_of
from ssd_engine.forward.step_inputs import StepInputs, StepRun, StepShape
from ssd_engine.kernels.sampling import drawing
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from tests.engine.execution.emulated_device import small_runner
from tests.engine.execution.test_tree_rows import Case
from tests.harness import BLOCK
from tools.gpu.attention_check import SMALL, check_attention, paged

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A device's matrix instructions want heads of at least 16; interpreted, those of 8 are quicker.
MODEL = "llama3-untied" if DEVICE.type == "cpu" else "qwen3"
LONGEST = 160
VERIFY = StepShape(rows=8, runs=3, rows_per_run=4, max_positions=LONGEST, block_size=BLOCK)
TREE = StepShape(
    rows=8,
    runs=2,
    rows_per_run=5,
    max_positions=LONGEST,
    block_size=BLOCK,
    scratch=32,
    moves=8,
    path=3,
)
DUMMY = 511


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return small_runner(tmp_path_factory.mktemp(MODEL), MODEL, device=DEVICE.type)


FAMILIES = ["qwen3"] if MODEL == "qwen3" else [MODEL, "olmo2", "qwen3"]
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def a_layer_in_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "LEADING_LAYERS", 1)


def run_step(
    runner: ModelRunner, shape: StepShape, parts: Sequence[Part], draws: Sequence[Draw | None]
) -> tuple[Step, list[int]]:
    ranks = 5 if shape.scratch else 1
    histories = Histories(shape.runs, shape.rows, runner.config.head_rows, DEVICE)
    step = Step(runner.model, runner.kv, shape, ranks, histories=histories)
    step.inputs.clear(DUMMY * BLOCK)
    runs, moves = step_runs(parts, draws, BLOCK)
    begins = step.inputs.fill(runs, DUMMY * BLOCK, moves)
    drawing = drawing_of(draws)
    if drawing >= Drawing.ADJUSTED:
        step.tell_histories(range(len(draws)), draws)
    with torch.inference_mode():
        step.run(drawing)
    return step, begins


@pytest.mark.sampled
@each_family
def test_a_round_computes_what_the_plain_forward_does(family: str, tmp_path: Path) -> None:
    runner = small_runner(tmp_path, family, device=DEVICE.type)
    rng = random.Random(1)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (5, 63, 120)]
    blocks = [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    runner.forward([Chunk(p, 0, b, 1) for p, b in zip(prompts, blocks, strict=True)])
    rounds = [
        Chunk([rng.randrange(512) for _ in range(k)], len(p), b, k)
        for k, p, b in zip((1, 4, 3), prompts, blocks, strict=True)
    ]
    expected = runner.forward(rounds)
    step, begins = run_step(runner, VERIFY, rounds, [None] * 8)
    ends = [begin + one.num_logits for begin, one in zip(begins, rounds, strict=True)]
    got = torch.cat([step.logits[a:b] for a, b in zip(begins, ends, strict=True)])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    others = [block for block in range(DUMMY) if not any(block in own for own in blocks)]
    assert not runner.kv.pool[:, others].any()  # what pads writes to no sequence


def test_a_row_has_the_same_bits_alone_and_among_others(runner: ModelRunner) -> None:
    """In a batch, at another place, verified after other tokens of its own sequence."""
    rng = random.Random(2)
    prompt = [rng.randrange(512) for _ in range(90)]
    text = [rng.randrange(512) for _ in range(3)]
    other = [rng.randrange(512) for _ in range(30)]
    own, theirs = list(range(8)), list(range(8, 12))
    runner.forward([Chunk(prompt, 0, own, 1), Chunk(other, 0, theirs, 1)])
    alone = []
    for i, token in enumerate(text):
        step, begins = run_step(runner, VERIFY, [Chunk([token], 90 + i, own, 1)], [None])
        alone.append(step.logits[begins[0]].clone())
    together = [Chunk([7, 8, 9], 30, theirs, 3), Chunk(text, 90, own, 3)]
    step, begins = run_step(runner, VERIFY, together, [None] * 6)
    assert torch.equal(step.logits[begins[1] :][:3], torch.stack(alone))


@pytest.mark.sampled
@each_family
def test_fused_layers_of_a_prefill_are_those_of_torch(family: str, tmp_path: Path) -> None:
    runner = small_runner(tmp_path, family, device=DEVICE.type)
    model, config = runner.model, runner.config
    chunk = Chunk(list(range(20, 29)), 0, [40], 3)
    expected = runner.forward([chunk])
    model.ops = FusedOps(model.rope, config.qk_norm_eps, model.num_heads, model.num_kv_heads)
    got = runner.forward([chunk])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.sampled
@each_family
def test_a_tree_computes_what_the_plain_forward_does(family: str, tmp_path: Path) -> None:
    runner = small_runner(tmp_path, family, device=DEVICE.type)
    rng = random.Random(3)
    cases = [Case(rng, 12 * i, (3, 5)[i], 2) for i in range(2)]
    runner.forward([case.chunk() for case in cases])
    for level in range(2):
        parts = [case.rows(level) for case in cases]
        rows = sum(part.num_logits for part in parts)
        expected = runner.forward(parts)
        step, _ = run_step(runner, TREE, parts, [None] * rows)
        torch.testing.assert_close(step.logits[:rows], expected, atol=2e-4, rtol=2e-4)


@dataclass(frozen=True)
class Asked:
    """Rows of a step, and how each of them is drawn."""

    rows: list[SampleRow]
    draws: list[Draw | None]


def sampled(*options: dict[str, Any]) -> Asked:
    rng = random.Random(3)
    rows = [
        SampleRow(SamplingParams(rng.getrandbits(64), **each), (), range(rng.randrange(200)))
        for each in options
    ]
    return Asked(rows, [Draw.of(row.params, row.position) for row in rows])


def penalised(params: SamplingParams, recent: int, *tails: Sequence[int]) -> Asked:
    """After a history that is one for all; ``recent`` tokens of each tail are the step's own."""
    history = History(params, [6, 30, 31], [32, 33, 33, 8, 8])
    rows = [SampleRow(params, history.prompt, [*history.output, *tail]) for tail in tails]
    draws: list[Draw | None] = [
        Draw.of(params, row.position, history, min(recent, len(tail)), tail[: len(tail) - recent])
        for row, tail in zip(rows, tails, strict=True)
    ]
    return Asked(rows, draws)


TOKENS = Case(random.Random(6), 0, 5, 2).rows(0).tokens  # of the tree below
PENALTIES = SamplingParams(  # which decide among tokens that a bias makes the likeliest
    seed=1,
    temperature=0.7,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=10.0,
    logit_bias=tuple((token, 90.0) for token in range(30, 37)),
)
DRAWN = {
    "plain": sampled(*({"temperature": t} for t in (0.0, 1.0, 0.7, 1.3))),
    "filters": sampled(
        {"top_k": 3},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.5, "min_p": 0.1, "temperature": 0.7},
        {"min_p": 0.3, "temperature": 1.3},
    ),
    "penalties": penalised(replace(PENALTIES, top_p=0.9), 1, [], [6], [], [8]),
    "greedy penalties": penalised(replace(PENALTIES, temperature=0.0), 1, [], [6], [], [8]),
}
RANKED = {
    "plain": sampled(*({"temperature": t} for t in (0.0, 1.0, 0.5, 2.0, 1.0))),
    "filters": sampled(*({"top_k": 20, "top_p": 0.999} for _ in range(5))),
    "few are left": sampled(*({"top_k": i + 1} for i in range(5))),
    "penalties": penalised(  # of branches with paths of their own
        PENALTIES,
        1,
        *(
            [*path, token]
            for path, token in zip(
                ([], [34], [35, 35], [36, 30, 31], [34, 35]), TOKENS, strict=True
            )
        ),
    ),
}


def drawn_step(runner: ModelRunner, asked: Asked) -> Step:
    rounds = [Chunk([5, 6], 20, [0, 1], 2), Chunk([7, 8], 20, [2, 3], 2)]
    step, begins = run_step(runner, VERIFY, rounds, asked.draws)
    got = torch.cat([step.logits[begin : begin + 2] for begin in begins])
    table = step.host_drawn.reshape(3, -1)
    tokens = [*table[0, 1:3].tolist(), *table[1, 1:3].tolist()]
    assert tokens == sample(got[:, : step.head_rows], asked.rows)
    assert max(tokens) < runner.config.vocab_size
    return step


def ranked_step(runner: ModelRunner, asked: Asked) -> Step:
    case = Case(random.Random(6), 0, 5, 2)
    runner.forward([case.chunk()])
    step, _ = run_step(runner, TREE, [case.rows(0)], asked.draws)
    got = step.logits[:5, : step.head_rows]
    best, lines = ranked_guesses(got, asked.rows, 5), step.guesses_on(0)[:5]
    assert lines[:, :5].tolist() == best
    assert lines[:, 5].tolist() == [ranking[0] for ranking in best]
    assert max(map(max, best)) < runner.config.vocab_size
    return step


@pytest.mark.sampled
@pytest.mark.parametrize("asked", DRAWN.values(), ids=DRAWN)
def test_a_step_draws_what_the_sampler_draws(runner: ModelRunner, asked: Asked) -> None:
    drawn_step(runner, asked)


@pytest.mark.sampled
@pytest.mark.parametrize("asked", RANKED.values(), ids=RANKED)
def test_a_step_ranks_by_the_scores_that_are_drawn_from(runner: ModelRunner, asked: Asked) -> None:
    ranked_step(runner, asked)


class UnevenRanks(SingleRank):
    """As ranks whose rows of the head do not divide: columns that are no logits come last."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        return torch.cat((x, x.new_full((x.shape[0], 3), 1e6)), dim=1)


@pytest.mark.sampled
@pytest.mark.parametrize(("run", "asked"), [(drawn_step, DRAWN), (ranked_step, RANKED)])
def test_a_step_looks_at_the_whole_head(
    runner: ModelRunner, run: Callable[..., Step], asked: dict[str, Asked]
) -> None:
    """Of 1,300 rows, for 512 tokens."""
    options = replace(runner.options, expand_to=ModelShape(hidden=100, vocab=1300))
    grown = ModelRunner(load_model_config(options.directory), options, UnevenRanks())
    if DEVICE.type == "cpu":
        del grown.model.weights.layers[2:], grown.kv.layers[2:]
    step = run(grown, asked["plain"])
    logits = step.logits.clone()
    logits[0, 1299] = 1e5
    step.draw(logits)
    assert 1299 in step.drawn[:2]


@pytest.mark.sampled
@pytest.mark.parametrize("frequency_penalty", [0.0, 30.0])
def test_a_step_follows_the_one_before_it(runner: ModelRunner, frequency_penalty: float) -> None:
    """A row that names a row of the step before takes the token that was best there. It is a part
    of its history, too: a bias for few tokens leaves the others of these."""
    case = Case(random.Random(7), 0, 5, 2)
    runner.forward([case.chunk()])
    last = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    histories = Histories(1, TREE.rows, runner.config.head_rows, DEVICE)
    steps = [Step(runner.model, runner.kv, TREE, 5, last=last, histories=histories) for _ in "ab"]
    bias = tuple((token, 90.0) for token in range(30, 37))
    penalties = dict(frequency_penalty=frequency_penalty, logit_bias=bias)
    params = SamplingParams(0, temperature=0.0, **(penalties if frequency_penalty else {}))
    history = History(params, [1], [2]) if frequency_penalty else None
    draws: list[Draw | None] = [Draw.of(params, 0, history, 1)] * 5

    def run(step: Step, part: Part) -> list[int]:
        step.inputs.clear(DUMMY * BLOCK)
        runs, moves = step_runs([part], draws, BLOCK)
        step.inputs.fill(runs, DUMMY * BLOCK, moves)
        if history is not None:
            step.tell_histories(range(5), draws)
        with torch.inference_mode():
            step.run(drawing_of(draws))
        return step.guesses_on(0)[:5, 0].tolist()

    first = run(steps[0], case.rows(0))
    named = run(steps[1], replace(case.rows(1), tokens=[-1, -2, -5, -4, -3]))
    told = [first[i] for i in (0, 1, 4, 3, 2)]
    assert named == run(steps[0], replace(case.rows(1), tokens=told))
    if history is not None:
        assert all(30 <= token < 37 for token in [*first, *named])
        assert all(token != before for token, before in zip(named, told, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_none_are_reported_for_their_row(runner: ModelRunner, bad: float) -> None:
    step, _ = run_step(runner, VERIFY, [Chunk([5, 6], 20, [0, 1], 2)], [None] * 2)
    assert step.host_drawn[5:7].tolist() == [0, 0]
    step.logits[1, 17] = bad
    step._draw(step.logits)
    assert step.drawn[5:7].tolist() == [0, 1]


def test_what_a_step_leaves_for_the_next_is_a_token_whatever_was_drawn() -> None:
    """Logits that are no numbers may draw anything; the next step looks it up all the same."""
    pieces, vocab = 3, 300
    tokens = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    begin = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    best = torch.zeros(2, pieces, dtype=torch.float64, device=DEVICE)
    drawn = torch.tensor([[767, -5, 1], [-1, 2, 3]], dtype=torch.int32, device=DEVICE)
    out, last = (torch.zeros(6, dtype=torch.int32, device=DEVICE) for _ in range(2))
    drawing.verdict_kernel[(2,)](
        tokens, begin, torch.ones_like(begin), best, drawn, torch.zeros_like(drawn), out, last,
        vocab, pieces, ROWS=1, PIECES=4, OVERLAP=False,
    )  # fmt: skip
    assert last[:2].tolist() == [vocab - 1, 0]


def test_attention_is_that_of_the_oracle() -> None:
    for result in check_attention(0, 1, paged, replace(SMALL, device=DEVICE)):
        assert result["worst_error"] < 1e-5, result
        assert result["unwritten_rows"] == 0, result


# What the host says to a step


def test_a_table_grows_and_is_written_anew_for_another_sequence() -> None:
    inputs = StepInputs(VERIFY, torch.device("cpu"))
    own, theirs = [4, 5], [9, 8]
    for length in range(30, 60):
        if length // BLOCK == len(own):
            own.append(length)
        for blocks in (own, theirs) if length == 50 else (own,):
            inputs.fill([StepRun([1], [length], [0], [length], blocks)], DUMMY)
            inputs.copy()
            used = min(length // BLOCK + 1, len(blocks))
            assert inputs["tables"].reshape(3, -1)[0, :used].tolist() == blocks[:used]


def test_rows_that_are_not_used_are_padding() -> None:
    inputs = StepInputs(VERIFY, torch.device("cpu"))
    inputs.clear(DUMMY)
    full = [StepRun([1] * 4, range(4), range(4), range(4), [i]) for i in range(2)]
    inputs.fill(full, DUMMY)
    inputs.fill(full[:1], DUMMY)
    inputs.copy()
    assert inputs["slots"].tolist() == [0, 1, 2, 3] + [DUMMY] * 4
    assert inputs["run_rows"].tolist() == [4, 0, 0]
    assert inputs["run_end"].tolist() == [4, 0, 0]
