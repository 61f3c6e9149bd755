"""Tokens that a device draws, and a draft's guesses, where a grammar says what may come."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.execution.step_drawing import PromptDrawing, StepDrawing
from ssd_engine.forward.batch import Draw, Drawing
from ssd_engine.forward.step_inputs import StepRun, StepShape
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.history import History
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, sample
from ssd_engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEPTH, RUNS, RANKS = 3, 4, 5
TOKENS = 4096
HEAD = 128_256 if DEVICE.type == "cuda" else TOKENS + 40  # growth adds rows that are no tokens
SHAPE = StepShape(
    RUNS * (DEPTH + 1), RUNS, DEPTH + 1, max_positions=512, block_size=16, path=DEPTH + 2
)
SCHEMA = """{"type": "object", "required": ["name", "age", "kind"], "properties": {
  "name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["red", "green"]}}}"""
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": ((20, 3.0), (95, -2.0))},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    directory = resolve_model("stories-target")
    tokenizer = Tokenizer(directory, load_model_config(directory))
    return GrammarCompiler(tokenizer.serialized(), TOKENS, [1])


def text_of(compiler: GrammarCompiler, grammar: Grammar, count: int, seed: int) -> list[int]:
    """A beginning of a text that the grammar allows."""
    rng, follower, text = random.Random(seed), compiler.follow(grammar), list[int]()
    while len(text) < count:
        allowed = follower.allowed(text)
        tokens = np.flatnonzero(np.unpackbits(allowed, bitorder="little"))
        text.append(int(rng.choice([token for token in tokens if token > 3])))
    return text


def histories_of(compiler: GrammarCompiler, seed: int) -> list[tuple[History, list[int]]]:
    """Of sequences, each with what is speculated after it; the last one has no grammar."""
    schema = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    words = Grammar(GrammarKind.REGEX, r"([a-z]{1,9} )+end")
    found = []
    for i, (grammar, options) in enumerate(zip((schema, words, schema), OPTIONS, strict=True)):
        text = text_of(compiler, grammar, 7 + DEPTH + i, seed + i)
        output, speculated = text[: 7 + i], text[7 + i :]
        params = SamplingParams(seed=seed + i, **options)
        history = History.of(params, [5, 6, 7], output, compiler.follow(grammar))
        found.append((history, speculated))
    free = SamplingParams(seed=seed, temperature=1.0, presence_penalty=0.5)
    return [*found, (History(free, [5, 6, 7], [8, 9]), [10, 11, 12])]


def rows_of(compiler: GrammarCompiler, history: History, tail: Sequence[int]) -> SampleRow:
    allowed = None if history.grammar is None else history.grammar.allowed(history.output, tail)
    return SampleRow(history.params, history.prompt, [*history.output, *tail], allowed)


def fill(step: StepDrawing, runs: Sequence[StepRun]) -> None:
    draws = [draw for run in runs for draw in run.draws]
    step.inputs.fill(runs, 0)
    step.tell_histories(range(len(draws)), draws)
    step.inputs.copy()
    step.write_masks(step.held_rows(range(len(draws)), draws))


def draw_of(history: History, after: int, recent: int, path: Sequence[int] = ()) -> Draw:
    position = len(history.prompt) + len(history.output) + after
    return Draw.of(history.params, position, history, recent, path)


def make_table() -> Histories:
    return Histories(RUNS, SHAPE.rows, HEAD, DEVICE, num_tokens=TOKENS)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return 4 * torch.randn(rows, HEAD, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_rounds_are_drawn_as_on_the_host(compiler: GrammarCompiler, seed: int, side: int) -> None:
    step = StepDrawing(SHAPE, HEAD, DEVICE, 1, False, num_sides=2, histories=make_table())
    step.use(side)
    step.inputs.clear(0)
    runs, rows = [], []
    for history, speculated in histories_of(compiler, 100 * seed + side):
        tokens = [history.output[-1], *speculated]
        draws = [draw_of(history, i, i) for i in range(DEPTH + 1)]
        places = list(range(DEPTH + 1))
        runs.append(StepRun(tokens, places, places, places, [0], draws=draws))
        rows += [rows_of(compiler, history, speculated[:i]) for i in range(DEPTH + 1)]
    fill(step, runs)
    logits = random_logits(len(rows), seed)
    step.draw(logits.to(DEVICE), Drawing.ADJUSTED)
    drawn = step.drawn.view(RUNS, -1)[:, 1 : DEPTH + 2].flatten().tolist()
    assert drawn == sample(logits, rows)
    assert sum(row.allowed is not None for row in rows) == 3 * (DEPTH + 1)


def test_guesses_after_branches_are_ranked_as_on_the_host(compiler: GrammarCompiler) -> None:
    """Branches of one sequence have different texts: its grammar is followed along each of them."""
    step = StepDrawing(SHAPE, HEAD, DEVICE, RANKS, False, histories=make_table())
    step.inputs.clear(0)
    history, speculated = histories_of(compiler, 7)[1]
    tails = [speculated[:1], speculated[:2], speculated[:2][::-1], speculated]
    runs = [
        StepRun([tail[-1]], [0], [0], [0], [0], draws=[draw_of(history, len(tail), 1, tail[:-1])])
        for tail in tails
    ]
    fill(step, runs)
    logits = random_logits(SHAPE.rows, 3)
    step.draw(logits.to(DEVICE), Drawing.ADJUSTED)
    lines = step.guesses_on(0)
    step.fetch(Drawing.ADJUSTED)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for i, tail in enumerate(tails):
        row = rows_of(compiler, history, tail)
        if row.allowed is not None:
            expected = ranked_guesses(logits[i : i + 1], [row], RANKS)[0]
            assert [token for token in lines[i, :RANKS].tolist() if token >= 0] == expected


@pytest.fixture
def after_prompts() -> PromptDrawing:
    return PromptDrawing(2, HEAD, DEVICE, False, make_table())


def test_first_tokens_after_prompts_follow_the_grammar(
    compiler: GrammarCompiler, after_prompts: PromptDrawing
) -> None:
    histories = [
        History(history.params, history.prompt, [], history.grammar)
        for history, _ in histories_of(compiler, 11)
    ]
    logits = random_logits(len(histories), 4)
    draws = [draw_of(history, 0, 0) for history in histories]
    result = after_prompts.draw(logits.to(DEVICE), draws)
    assert result.drawn == sample(logits, [rows_of(compiler, each, ()) for each in histories])


def test_what_is_no_logit_is_told_even_where_the_grammar_leaves_it_out(
    compiler: GrammarCompiler, after_prompts: PromptDrawing
) -> None:
    history, _ = histories_of(compiler, 13)[0]
    allowed = rows_of(compiler, history, ()).allowed
    logits = torch.zeros(1, HEAD)
    logits[0, np.flatnonzero(np.unpackbits(allowed, bitorder="little") == 0)[0]] = float("nan")
    assert after_prompts.draw(logits.to(DEVICE), [draw_of(history, 0, 0)]).broken[0]


def test_where_nothing_can_follow_something_is_drawn_to_be_left_out(
    compiler: GrammarCompiler, after_prompts: PromptDrawing
) -> None:
    grammar = Grammar(GrammarKind.CHOICES, '["a"]')
    follower = compiler.follow(grammar)
    text = text_of(compiler, grammar, 1, 0)
    ended = History(SamplingParams(seed=1, temperature=0.0), [5], [*text, 1], follower)
    (token,) = (
        after_prompts.draw(random_logits(1, 5).to(DEVICE), [draw_of(ended, 0, 0)]).drawn or ()
    )
    assert follower.num_allowed(ended.output, [token]) == 0
