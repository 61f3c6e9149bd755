"""The kernels of a CUDA device, interpreted where there is none: steps of few rows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import ModelShape
from ssd_engine.execution import step
from ssd_engine.execution.device_layer_ops import FusedOps
from ssd_engine.execution.graphs import step_runs
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, Draw, Drawing, KVCopy, Part, drawing_of
from ssd_engine.forward.result import ForwardResult
from ssd_engine.forward.step_inputs import StepInputs, StepRun, StepShape
from ssd_engine.kernels.sampling import drawing
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.sampling.sampler import SampleRow, logprobs, sample
from tests.engine.execution.test_tree_rows import Case
from tests.harness import BLOCK, make_runner
from tests.random_models import make_model
from tests.suite.scale import FULL, full_only
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


def load(kind: str, factory: pytest.TempPathFactory) -> ModelRunner:
    directory = factory.mktemp(kind)
    make_model(kind, directory)
    runner = make_runner(directory, device=DEVICE.type, kernels="torch")
    if DEVICE.type == "cpu":  # a kernel that is interpreted takes its time: one layer less
        del runner.model.weights.layers[2:], runner.kv.layers[2:]
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(MODEL, tmp_path_factory)


EITHER = ["qwen3"] if MODEL == "qwen3" else [MODEL, *map(full_only, ("olmo2", "qwen3"))]


@pytest.fixture(scope="module", params=EITHER)
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(request.param, tmp_path_factory)


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


def logits_of(step: Step, begin: int, rows: int) -> Tensor:
    assert step.logits is not None
    return step.logits[begin : begin + rows]


def test_a_round_computes_what_the_plain_forward_does(either: ModelRunner) -> None:
    runner, rng = either, random.Random(1)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (5, 63, 120)]
    blocks = [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    runner.forward([Chunk(p, 0, b, 1) for p, b in zip(prompts, blocks, strict=True)])
    rounds = [
        Chunk([rng.randrange(512) for _ in range(k)], len(p), b, k)
        for k, p, b in zip((1, 4, 3), prompts, blocks, strict=True)
    ]
    expected = runner.forward(rounds)
    assert expected is not None
    step, begins = run_step(runner, VERIFY, rounds, [None] * 8)
    got = torch.cat([logits_of(step, b, r.num_logits) for b, r in zip(begins, rounds, strict=True)])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


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
        alone.append(logits_of(step, begins[0], 1).clone())
    together = [Chunk([7, 8, 9], 30, theirs, 3), Chunk(text, 90, own, 3)]
    step, begins = run_step(runner, VERIFY, together, [None] * 6)
    assert torch.equal(logits_of(step, begins[1], 3), torch.cat(alone))


def test_fused_layers_of_a_prefill_are_those_of_torch(either: ModelRunner) -> None:
    model, config = either.model, either.config
    chunk = Chunk(list(range(20, 29)), 0, [40], 3)
    expected = either.forward([chunk])
    theirs = model.ops
    model.ops = FusedOps(model.rope, config.qk_norm_eps, model.num_heads, model.num_kv_heads)
    try:
        got = either.forward([chunk])
    finally:
        model.ops = theirs
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_padding_writes_to_no_sequence(runner: ModelRunner) -> None:
    before = runner.kv.pool.clone()
    run_step(runner, VERIFY, [Chunk([3], 20, [0, 1], 1)], [None])
    changed = (runner.kv.pool != before).any(dim=-1).any(dim=-1)  # [layers * 2, blocks, size]
    places = {(int(b), int(o)) for _, b, o in changed.nonzero()}
    assert places <= {(1, 4), (DUMMY, 0)}
    assert (1, 4) in places


def test_a_tree_computes_what_the_plain_forward_does(either: ModelRunner) -> None:
    runner, rng = either, random.Random(3)
    cases = [Case(rng, 12 * i, (3, 5)[i], 2) for i in range(2)]
    runner.forward([case.chunk() for case in cases])
    for level in range(2):
        parts = [case.rows(level) for case in cases]
        rows = sum(part.num_logits for part in parts)
        expected = runner.forward(parts)
        assert expected is not None
        step, _ = run_step(runner, TREE, parts, [None] * rows)
        torch.testing.assert_close(logits_of(step, 0, rows), expected, atol=2e-4, rtol=2e-4)


def test_the_kv_of_a_taken_branch_is_moved_first(runner: ModelRunner) -> None:
    rng = random.Random(4)
    case = Case(rng, 0, 5, 3)
    runner.forward([case.chunk()])
    for level in range(3):
        runner.forward([case.rows(level)])
    start = len(case.prefix) + case.leaves[2]
    moved = KVCopy(case.scratch[2::5], start, case.blocks)
    path = case.prefix + case.chain[: case.leaves[2]] + case.branches[2]
    alone = runner.forward([Chunk([*path, 9], 0, list(range(300, 310)), 1)])
    assert alone is not None
    parts = [moved, Chunk([9], moved.end, case.blocks, 1)]
    step, begins = run_step(runner, TREE, parts, [None])
    torch.testing.assert_close(logits_of(step, begins[0], 1), alone, atol=2e-4, rtol=2e-4)


def sample_rows(temperatures: Sequence[float], seed: int = 0) -> list[SampleRow]:
    rng = random.Random(seed)
    return [
        SampleRow(SamplingParams(rng.getrandbits(64), t), (), range(rng.randrange(200)))
        for t in temperatures
    ]


def draws_of(rows: Sequence[SampleRow]) -> list[Draw | None]:
    return [Draw.of(row.params, row.position) for row in rows]


FILTERS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.5, "min_p": 0.1},
    {"min_p": 0.3},
    {},
]


def filtered(rows: Sequence[SampleRow]) -> list[SampleRow]:
    return [
        replace(row, params=replace(row.params, **FILTERS[i % len(FILTERS)]))
        for i, row in enumerate(rows)
    ]


def assert_draws_what_the_sampler_draws(
    runner: ModelRunner,
    rows: Sequence[SampleRow] | None = None,
    draws: Sequence[Draw | None] = (),
) -> Step:
    rows = rows or sample_rows((0.0, 1.0, 0.7, 1.3))
    rounds = [Chunk([5, 6], 20, [0, 1], 2), Chunk([7, 8], 20, [2, 3], 2)]
    step, begins = run_step(runner, VERIFY, rounds, draws or draws_of(rows))
    got = torch.cat([logits_of(step, begin, 2) for begin in begins])
    table = step.host_drawn.reshape(3, -1)
    tokens = [*table[0, 1:3].tolist(), *table[1, 1:3].tolist()]
    assert tokens == sample(got[:, : step.head_rows], rows)
    assert max(tokens) < runner.config.vocab_size
    return step


def assert_ranks_by_the_scores_that_are_drawn_from(
    runner: ModelRunner,
    rows: Sequence[SampleRow] | None = None,
    draws: Sequence[Draw | None] = (),
) -> Step:
    rows = rows or sample_rows((0.0, 1.0, 0.5, 2.0, 1.0), seed=3)
    case = Case(random.Random(6), 0, 5, 2)
    runner.forward([case.chunk()])
    step, _ = run_step(runner, TREE, [case.rows(0)], draws or draws_of(rows))
    got = logits_of(step, 0, 5)[:, : step.head_rows]
    best = ranked_guesses(got, rows, 5)
    lines = step.guesses_on(0)[:5]
    assert lines[:, :5].tolist() == best
    assert lines[:, 5].tolist() == [ranking[0] for ranking in best]
    assert max(map(max, best)) < runner.config.vocab_size
    return step


def test_a_step_draws_what_the_sampler_draws(runner: ModelRunner) -> None:
    assert_draws_what_the_sampler_draws(runner)


def test_a_step_ranks_by_the_scores_that_are_drawn_from(runner: ModelRunner) -> None:
    assert_ranks_by_the_scores_that_are_drawn_from(runner)


def test_a_step_draws_what_filters_leave(runner: ModelRunner) -> None:
    assert_draws_what_the_sampler_draws(runner, filtered(sample_rows((1.0, 1.0, 0.7, 1.3), seed=5)))


@pytest.mark.parametrize(
    "temperatures", [full_only((0.0, 0.0)), (1.0, 0.7)], ids=["greedy", "drawn"]
)
def test_a_step_draws_after_penalties_and_bias(
    runner: ModelRunner, temperatures: tuple[float, float]
) -> None:
    """Which decide: a bias makes some tokens the likeliest, penalties choose among them."""
    rows: list[SampleRow] = []
    draws: list[Draw | None] = []
    for number, (tokens, filters) in enumerate((((5, 6), {}), ((7, 8), {"top_p": 0.9}))):
        params = SamplingParams(
            seed=number,
            temperature=temperatures[number],
            repetition_penalty=(1.1, 0.9)[number],
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias=tuple((token, 100.0) for token in (6, 8, 40, 50, 60)),
            **filters,
        )
        history = History(params, [6, 40, 90], [8, 8, 50, 50, 6, tokens[0]])
        for i in range(2):
            rows.append(SampleRow(params, history.prompt, [*history.output, *tokens[1 : i + 1]]))
            draws.append(Draw.of(params, rows[-1].position, history, i))
    step = assert_draws_what_the_sampler_draws(runner, rows, draws)
    assert step.logits is not None
    plain = [replace(row, params=SamplingParams(row.params.seed)) for row in rows]
    assert sample(step.logits[:4, : step.head_rows], plain) != sample(
        step.logits[:4, : step.head_rows], rows
    )


@pytest.mark.full
def test_a_step_reports_the_models_own_probabilities(runner: ModelRunner) -> None:
    """Of what was drawn after a bias, before it."""
    bias = tuple((token, 100.0) for token in (40, 50, 60))
    params = SamplingParams(1, temperature=0.7, top_k=2, logit_bias=bias)
    history = History(params, [6], [7])
    rows = [SampleRow(params, [6], [7, *recent]) for recent in ([], [6], [], [8])]
    draws = [
        Draw.of(params, row.position, history, i % 2, top_logprobs=5) for i, row in enumerate(rows)
    ]
    step = assert_draws_what_the_sampler_draws(runner, rows, draws)
    assert step.logits is not None
    scored = ForwardResult(lambda: None, reported=ReportedLogprobs(step.reported_on(0)))
    drawn = step.host_drawn.reshape(3, -1)[:2, 1:3].flatten().tolist()
    assert set(drawn) <= {40, 50, 60}
    got = [scored.logprobs(row, 5) for row in range(4)]
    assert got == logprobs(step.logits[:4, : step.head_rows].cpu(), drawn, [5] * 4)


@pytest.mark.full
def test_a_step_ranks_what_filters_leave(runner: ModelRunner) -> None:
    """Where they leave as many as are ranked."""
    rows = sample_rows((0.0, 1.0, 0.5, 2.0, 1.0), seed=3)
    rows = [replace(row, params=replace(row.params, top_k=20, top_p=0.999)) for row in rows]
    assert_ranks_by_the_scores_that_are_drawn_from(runner, rows)


@pytest.mark.full
def test_a_step_ranks_after_penalties_and_bias(runner: ModelRunner) -> None:
    """Of branches with paths of their own."""
    tokens = Case(random.Random(6), 0, 5, 2).rows(0).tokens
    params = SamplingParams(
        1,
        repetition_penalty=1.1,
        frequency_penalty=10.0,
        logit_bias=tuple((token, 90.0) for token in range(30, 37)),
    )
    history = History(params, [30, 31], [32, 33, 33])
    rows: list[SampleRow] = []
    draws: list[Draw | None] = []
    for token, path in zip(tokens, ([], [34], [35, 35], [36, 30, 31], [34, 35]), strict=True):
        rows.append(SampleRow(params, history.prompt, [*history.output, *path, token]))
        draws.append(Draw.of(params, rows[-1].position, history, 1, path))
    assert_ranks_by_the_scores_that_are_drawn_from(runner, rows, draws)


def test_ranks_go_on_with_what_filters_leave_out(runner: ModelRunner) -> None:
    rows = sample_rows((1.0, 1.0, 1.0, 1.0, 1.0), seed=3)
    rows = [replace(row, params=replace(row.params, top_k=i + 1)) for i, row in enumerate(rows)]
    step = assert_ranks_by_the_scores_that_are_drawn_from(runner, rows)
    got = logits_of(step, 0, 5)[:, : step.head_rows]
    assert step.guesses_on(0)[:5, 5].tolist() == sample(got, rows)


class UnevenRanks(SingleRank):
    """As ranks whose rows of the head do not divide: columns that are no logits come last."""

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return torch.cat((x, x.new_full((x.shape[0], 3), 1e6)), dim=1)


@pytest.fixture(scope="module")
def grown(runner: ModelRunner) -> ModelRunner:
    """With a head of 1,300 rows, for 512 tokens."""
    options = replace(runner.options, expand_to=ModelShape(hidden=100, vocab=1300))
    grown = ModelRunner(load_model_config(options.directory), options, UnevenRanks())
    if DEVICE.type == "cpu":
        del grown.model.weights.layers[2:], grown.kv.layers[2:]
    return grown


def test_a_step_draws_over_the_whole_head(grown: ModelRunner) -> None:
    step = assert_draws_what_the_sampler_draws(grown)
    assert step.logits is not None
    logits = step.logits.clone()
    logits[0, 1299] = 1e5
    step._draw(logits)
    assert step.drawn[1] == 1299


@pytest.mark.full
def test_a_step_ranks_over_the_whole_head(grown: ModelRunner) -> None:
    step = assert_ranks_by_the_scores_that_are_drawn_from(grown)
    assert step.logits is not None
    logits = step.logits.clone()
    logits[0, 1299] = 1e5
    step.draw(logits)
    assert step.drawn[0] == 1299


@pytest.mark.parametrize("penalised", [full_only(False), True], ids=["plain", "penalised"])
def test_a_step_follows_the_one_before_it(runner: ModelRunner, penalised: bool) -> None:
    """A row that names a row of the step before takes the token that was best there. It is a part
    of its history, too: a bias for few tokens leaves the others of these."""
    case = Case(random.Random(7), 0, 5, 2)
    runner.forward([case.chunk()])
    last = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    histories = Histories(1, TREE.rows, runner.config.head_rows, DEVICE)
    steps = [Step(runner.model, runner.kv, TREE, 5, last=last, histories=histories) for _ in "ab"]
    bias = tuple((token, 90.0) for token in range(30, 37))
    params = SamplingParams(0, temperature=0.0, frequency_penalty=30.0, logit_bias=bias)
    history = History(params, [1], [2]) if penalised else None
    draws: list[Draw | None] = [Draw.of(params, 0, history, 1)] * 5

    def run(step: Step, part: Part) -> list[int]:
        step.inputs.clear(DUMMY * BLOCK)
        runs, moves = step_runs([part], draws, BLOCK)
        step.inputs.fill(runs, DUMMY * BLOCK, moves)
        if penalised:
            step.tell_histories(range(5), draws)
        with torch.inference_mode():
            step.run(drawing_of(draws))
        best: list[int] = step.guesses_on(0)[:5, 0].tolist()
        return best

    first = run(steps[0], case.rows(0))
    named = run(steps[1], replace(case.rows(1), tokens=[-1, -2, -5, -4, -3]))
    told = [first[i] for i in (0, 1, 4, 3, 2)]
    assert named == run(steps[0], replace(case.rows(1), tokens=told))
    if penalised:
        assert all(30 <= token < 37 for token in [*first, *named])
        assert all(token != before for token, before in zip(named, told, strict=True))


def test_a_tree_goes_deeper_as_if_it_were_said(runner: ModelRunner) -> None:
    """Of what the device has drawn the host need not know, whatever penalties it has."""
    case = Case(random.Random(8), 0, 5, 3)
    runner.forward([case.chunk()])
    shape = replace(TREE, path=6)
    bias = tuple((token, 90.0) for token in range(30, 37))
    params = SamplingParams(0, temperature=0.0, frequency_penalty=30.0, logit_bias=bias)
    history, vocab = History(params, [1], [2]), runner.config.head_rows

    def make() -> Step:
        last = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        histories = Histories(1, shape.rows, vocab, DEVICE, most_chained=6)
        made = Step(runner.model, runner.kv, shape, 5, last=last, num_sides=2, histories=histories)
        made.inputs.clear(DUMMY * BLOCK)
        return made

    def run(step: Step, side: int) -> list[list[int]]:
        with torch.inference_mode():
            step.run(Drawing.ADJUSTED)
        guesses: list[list[int]] = step.guesses_on(side)[:5, :5].tolist()
        return guesses

    def say(step: Step, part: Part, path: Sequence[tuple[int, ...]]) -> list[list[int]]:
        draws: list[Draw | None] = [Draw.of(params, 0, history, 1, each) for each in path]
        step.inputs.fill(step_runs([part], draws, BLOCK)[0], DUMMY * BLOCK)
        step.tell_histories(range(5), draws)
        return run(step, 0)

    deeper, said, path = make(), make(), [(31,), (32,), (33,), (31,), (40,)]
    found = say(deeper, case.rows(0), path)
    assert found == say(said, case.rows(0), path)
    given = list(case.rows(0).tokens)
    for depth in range(1, 3 if FULL else 2):
        deeper.use(depth % 2)
        slots = case.rows(depth).slots
        assert deeper.deepen(1 - depth % 2, Drawing.ADJUSTED, slots, [-1] * 5)
        path = [(*each, token) for each, token in zip(path, given, strict=True)]
        given = [best[0] for best in found]
        found = run(deeper, depth % 2)
        assert found == say(said, replace(case.rows(depth), tokens=given), path)
    assert {token for best in found for token in best[:2]} <= set(range(30, 37))


def test_the_outcome_is_found_where_the_tokens_are_drawn(runner: ModelRunner) -> None:
    """However many of the speculated tokens are right."""
    greedy: list[Draw | None] = [Draw(0, 0.0, 0)] * 4
    text: list[int] = [5]
    for _ in range(3):
        step, _ = run_step(runner, VERIFY, [Chunk(text, 20, [0, 1], len(text))], greedy)
        text.append(int(step.host_drawn[len(text)]))
    for accepted in (0, 2, 3):
        tokens = list(text)
        if accepted < 3:
            tokens[accepted + 1] = (tokens[accepted + 1] + 1) % 512
        step, _ = run_step(runner, VERIFY, [Chunk(tokens, 20, [0, 1], 4)], greedy)
        assert int(step.host_drawn[0]) == accepted
        assert step.host_drawn[1 : 2 + accepted].tolist()[:-1] == text[1 : 1 + accepted]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_none_are_reported_for_their_row(runner: ModelRunner, bad: float) -> None:
    step, _ = run_step(runner, VERIFY, [Chunk([5, 6], 20, [0, 1], 2)], [None] * 2)
    assert step.logits is not None
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


def test_a_table_is_written_once_and_then_as_it_grows() -> None:
    inputs = StepInputs(VERIFY, torch.device("cpu"))
    blocks = [4, 5]
    for length in range(30, 60):
        if length // BLOCK == len(blocks):
            blocks.append(length)
        run = StepRun([1], [length], [0], [length], blocks)
        inputs.fill([run], DUMMY)
        inputs.copy()
        used = length // BLOCK + 1
        assert inputs["tables"].reshape(3, -1)[0, :used].tolist() == blocks[:used]


def test_a_table_of_another_sequence_is_written_anew() -> None:
    inputs = StepInputs(VERIFY, torch.device("cpu"))
    first, second = [1, 2, 3, 4], [9, 8]
    for blocks in (first, second, first):
        inputs.fill([StepRun([1], [17], [0], [17], blocks)], DUMMY)
        inputs.copy()
        assert inputs["tables"][:2].tolist() == blocks[:2]


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


def test_seeds_of_64_bits_arrive_whole() -> None:
    inputs = StepInputs(VERIFY, torch.device("cpu"))
    seeds = [0, (1 << 64) - 1, 1 << 63, 12345678901234567890]
    draws = [Draw(seed, 0.5, 7) for seed in seeds]
    inputs.fill([StepRun([1] * 4, range(4), range(4), range(4), [0], draws=draws)], DUMMY)
    inputs.copy()
    assert [int(s) % (1 << 64) for s in inputs["seeds"][:4]] == seeds
    assert inputs["temperatures"][:4].tolist() == [0.5] * 4
