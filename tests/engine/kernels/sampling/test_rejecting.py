"""Rejection on the device ends every round as ``verify_rejection`` does on the same logits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd_engine.execution.step_drawing import StepDrawing
from ssd_engine.forward.batch import Draw, Drawing, drawing_of
from ssd_engine.forward.result import RejectionVerdict
from ssd_engine.forward.step_inputs import StepRun, StepShape
from ssd_engine.kernels.sampling.adjusting import Histories
from ssd_engine.kernels.sampling.rejecting import Rejector
from ssd_engine.sampling.history import History
from ssd_engine.sampling.noise import STREAM_DRAFT, signed64
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import (
    SampledSpeculation,
    draft_distribution,
    draw_from,
    sigma_of,
    verify_rejection,
)
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from tests.suite.scale import FULL, full_only

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    # Lanes that are masked later are computed all the same; numpy says so where it interprets.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 1500  # two pieces
DEPTH = 3
MOST = 60 if FULL else 8  # rounds of one step
PROMPT = [1, 5, 5]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAIN: dict[str, Any] = {}
GREEDY: dict[str, Any] = dict(temperature=0.0)
FILTERS: list[dict[str, Any]] = [
    dict(temperature=1.3, top_k=40),
    dict(temperature=0.8, top_p=0.9),
    dict(top_k=200, top_p=0.7, min_p=0.001),
]
PENALTIES: dict[str, Any] = dict(
    temperature=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.7,
    logit_bias=((2, 5.0), (1400, 4.0), (300, -9.0)),
)


@dataclass(frozen=True)
class Round:
    """What a target knows of a round. Its logits [known tokens + 1 or more, VOCAB]."""

    params: SamplingParams
    output: list[int]
    logits: Tensor
    about: SampledSpeculation

    def rows(self) -> list[SampleRow]:
        said = [[*self.output, *self.about.tokens[:i]] for i in range(len(self.about.tokens) + 1)]
        return [SampleRow(self.params, PROMPT, output) for output in said]

    def draws(self) -> list[Draw | None]:
        told = History(self.params, PROMPT, self.output)
        history = told if self.params.adjusts_logits else None
        return [Draw.of(self.params, row.position, history, i) for i, row in enumerate(self.rows())]

    def expected(self) -> tuple[int, int]:
        """As the host verifies it, alone."""
        about = self.about
        width = VOCAB if about.wire is None else min(VOCAB, about.wire.shape[1])
        wire = None if about.wire is None else about.wire[:, :width]
        p = target_distribution(self.logits, self.rows())[:, :width]
        return verify_rejection(p, [replace(about, wire=wire)])[0]


def make_round(
    seed: int,
    options: dict[str, Any],
    depth: int = DEPTH,
    near: float = 0.7,
    width: int | None = None,
    beyond: float = 0.0,
) -> Round:
    """The draft's logits are the target's and some noise, ``near`` that much. It knows ``width``
    tokens, or all; the target likes the others better, ``beyond`` that much."""
    width = VOCAB if width is None else width
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(depth + 1, VOCAB, generator=generator)
    logits[:, width:] += beyond
    params = SamplingParams(seed=(seed * 0x9E3779B97F4A7C15) % 2**64, **options)
    output = [random.Random(seed).randrange(VOCAB) for _ in range(seed % 7)]
    position = len(PROMPT) + len(output)
    tokens: list[int] = []
    wires: list[Tensor] = []
    own = replace(params, logit_bias=())
    for i in range(depth):
        guessed = logits[i : i + 1] + near * torch.randn(1, VOCAB, generator=generator)
        row = SampleRow(own, PROMPT, [*output, *tokens])
        wires.append(draft_distribution(guessed, [row], 3, 0.7)[:, :width])
        key = torch.tensor([signed64(params.seed)]), torch.tensor([position + i])
        tokens += draw_from(sigma_of(wires[-1]), *key, STREAM_DRAFT).tolist()
    wire = torch.cat(wires) if wires else None
    return Round(params, output, logits, SampledSpeculation(params.seed, position, tokens, wire))


def changed(made: Round, **changes: Any) -> Round:
    return replace(made, about=replace(made.about, **changes))


def judge(rounds: Sequence[Round]) -> list[RejectionVerdict]:
    """All in one step, as its first rows; a row more pads it."""
    counts = [len(each.about.tokens) + 1 for each in rounds]
    shape = StepShape(sum(counts) + 1, len(rounds), DEPTH + 1, max_positions=1, block_size=1)
    histories = Histories(len(rounds), shape.rows, VOCAB, DEVICE)
    step = StepDrawing(shape, VOCAB, DEVICE, 1, overlap=False, histories=histories)
    step.inputs.clear(0)
    draws = [each.draws() for each in rounds]
    runs = [
        StepRun([0, *r.about.tokens], *[[0] * n] * 3, [0], draws=how)
        for r, n, how in zip(rounds, counts, draws, strict=True)
    ]
    begins, flat = step.inputs.fill(runs, 0), [draw for how in draws for draw in how]
    drawing = drawing_of(flat)
    if drawing >= Drawing.ADJUSTED:
        step.tell_histories(range(len(flat)), flat)
    padding = torch.zeros(1, VOCAB)
    logits = torch.cat([*(r.logits[:n] for r, n in zip(rounds, counts, strict=True)), padding])
    logits = logits.to(DEVICE)
    rejector = Rejector(len(rounds), shape.rows, DEPTH + 1, VOCAB, DEVICE)
    step.inputs.copy()
    scores = step.scores(logits, drawing)
    if drawing == Drawing.PLAIN:  # what was drawn need only be likely: time is saved
        scores = replace(scores, drawn=logits.argmax(dim=-1).int())
    else:
        step.draw(logits, drawing)
    told = [(begin, r.about) for begin, r in zip(begins, rounds, strict=True)]
    return rejector.judge(scores, told)


def check(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    got = [(verdict.accepted, verdict.token) for verdict in judge(rounds)]
    assert got == [each.expected() for each in rounds]
    return got


def plain_and_greedy() -> list[Round]:
    """Whatever number of tokens is right; a round without any has one row."""
    rounds = [make_round(seed, PLAIN, depth=(3, 3, 2, 0, 1)[seed % 5]) for seed in range(MOST)]
    return rounds + [make_round(seed, GREEDY, near=0.2) for seed in range(2)]


def filtered_and_penalised() -> list[Round]:
    options = [FILTERS[2], {**PENALTIES, "top_p": 0.8}, {**PENALTIES, **GREEDY}]
    options += [*FILTERS[:2], PENALTIES] if FULL else []
    return [make_round(seed, told, depth=1) for seed, told in enumerate(options)]


def not_drawn() -> list[Round]:
    """A token that was not drawn is a point mass. Likely ones, so that some are right."""
    made = [make_round(seed, dict(temperature=0.3)) for seed in range(4)]
    likely = [each.logits[:DEPTH].argmax(dim=-1).tolist() for each in made]
    return [changed(each, tokens=t, wire=None) for each, t in zip(made, likely, strict=True)]


def useless() -> list[Round]:
    """A row of what is told that is missing, or says nothing about its token."""
    made = make_round(2, PLAIN, depth=2, near=0.0)
    wire = made.about.wire
    rounds = [made, changed(made, wire=wire[:1]), changed(made, wire=wire[:0])]
    for value in (0.0, torch.nan, torch.inf):
        spoilt = wire.clone()
        spoilt[1] = value
        rounds.append(changed(made, wire=spoilt))
    excluding = wire.clone()
    excluding[1, made.about.tokens[1]] = 0.0
    return [*rounds, changed(made, wire=excluding)]


def of_smaller_vocabularies() -> list[Round]:
    width = VOCAB - 700
    rounds = [make_round(seed, PLAIN, 1, width=width, beyond=3.0) for seed in range(3)]
    greedy = make_round(9, GREEDY)
    greedy.logits[:, -1] = 99.0  # nothing has a probability
    few = torch.ones(1, 100).bfloat16()
    padded = changed(rounds[0], wire=pad(rounds[0].about.wire, (0, 800)))
    return [*rounds, padded, changed(greedy, tokens=[7], wire=few)]


def without_residual() -> list[Round]:
    """p is smaller than sigma everywhere, as most of it lies beyond the draft's vocabulary."""
    made = [make_round(seed, PLAIN, depth=1) for seed in range(4)]
    wire = torch.full((1, 50), 1 / 64, dtype=torch.bfloat16)
    return [
        changed(replace(each, logits=torch.zeros_like(each.logits)), tokens=[seed], wire=wire)
        for seed, each in enumerate(made)
    ]


def of_another_dtype() -> list[Round]:
    first, second = (make_round(seed, PLAIN, depth=1) for seed in range(2))
    return [changed(first, wire=first.about.wire.float() * 1.01), second]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        (plain_and_greedy, {0, 1, 2, 3}),
        (filtered_and_penalised, {0, 1}),
        (not_drawn, {0}),
        (useless, {0, 1, 2}),
        (of_smaller_vocabularies, {0}),
        (without_residual, {0}),
        (of_another_dtype, set()),
    ],
)
def test_rounds_end_as_on_the_host(make: Callable[[], list[Round]], accepted: set[int]) -> None:
    assert accepted <= {each for each, _ in check(make())}


def test_a_token_that_the_draft_does_not_know_was_not_drawn() -> None:
    width = VOCAB - 700
    made = make_round(1, PLAIN, 1, width=width, beyond=3.0)
    (verdict,) = judge([changed(made, tokens=[width + 5])])
    without = changed(made, wire=made.about.wire[:0])
    assert (verdict.accepted, verdict.token) == without.expected()


@pytest.mark.parametrize(
    "vocab", [full_only(2500), pytest.param(128_256, marks=[pytest.mark.gpu, NEEDS_GPU])]
)
def test_larger_vocabularies_have_more_pieces(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "VOCAB", vocab)
    options = [PLAIN, GREEDY, *FILTERS, PENALTIES]
    got = check([make_round(seed, options[seed % 6]) for seed in range(12)])
    assert len({accepted for accepted, _ in got}) > 1
    assert any(token > 2048 for _, token in got)


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_from_logits_that_are_none_nothing_is_drawn(bad: float) -> None:
    """Rows after the end of a round may hold anything."""
    rounds = (make_round(seed, PLAIN, depth=2, near=1.5) for seed in range(20))
    made = next(each for each in rounds if each.expected()[0] == 0)
    (verdict,) = judge([made])
    logits = made.logits.repeat(2, 1, 1)
    logits[[0, 1], [0, 1], : VOCAB if bad < 0 else 1] = bad
    ruined, whole = judge([replace(made, logits=each) for each in logits])
    assert ruined.token == -1
    assert whole == verdict
