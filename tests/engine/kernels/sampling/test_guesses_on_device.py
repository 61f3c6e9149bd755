"""A draft's guesses on the device are those of ``guessing.py``, and rejection's sigma, too."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.execution.step_drawing import StepDrawing
from ssd_engine.forward.batch import Draw
from ssd_engine.forward.step_inputs import StepRun, StepShape
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.noise import STREAM_DRAFT, signed64
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import LIKELIEST, draft_distribution, draw_from, sigma_of
from ssd_engine.sampling.sampler import SampleRow, sample, warp_logits

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = 2500  # tokens: of so many random ones, those that are looked at have nearly all of the mass
VOCAB = 128_256 if DEVICE.type == "cuda" else FEW
RANKS = 17
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 3},
]


def sample_rows(seed: int) -> list[SampleRow]:
    return [
        SampleRow(SamplingParams(seed=2**63 + 1000 * seed + i, **each), (), range(i + seed))
        for i, each in enumerate(OPTIONS)
    ]


def random_logits(seed: int) -> Tensor:
    return 3 * torch.randn(len(OPTIONS), VOCAB, generator=torch.Generator().manual_seed(seed))


def guess(logits: Tensor, draws: Sequence[Draw]) -> tuple[StepDrawing, Tensor]:
    """The step, and its lines: what is best in each row, what follows it, and sigma."""
    shape = StepShape(len(draws), len(draws), 1, max_positions=1, block_size=1)
    step = StepDrawing(shape, VOCAB, DEVICE, RANKS, overlap=False)
    step.inputs.clear(0)
    step.inputs.fill([StepRun([0], [0], [0], [0], [0], draws=[draw]) for draw in draws], 0)
    step.inputs.copy()
    with torch.inference_mode():
        step.draw(logits.to(DEVICE))
    return step, step.drawn.view(len(draws), -1).cpu()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [0, 1])
def test_guesses_are_ranked_by_the_targets_noise_as_on_the_host(seed: int) -> None:
    logits, rows = random_logits(seed), sample_rows(seed)
    _, lines = guess(logits, [Draw.of(row.params, row.position) for row in rows])
    for i, row in enumerate(rows):
        expected = ranked_guesses(logits[i : i + 1], [row], RANKS)[0]
        assert lines[i, :RANKS].tolist() == expected
        assert lines[i, RANKS] == expected[0]


def test_what_filters_leave_out_is_guessed_after_the_best_that_they_leave() -> None:
    logits, rows = random_logits(2)[:, :FEW], sample_rows(2)
    left = warp_logits(logits, [row.params for row in rows]).isfinite()
    drawn = sample(logits, rows)
    for i, row in enumerate(rows):
        guesses = ranked_guesses(logits[i : i + 1], [row], RANKS)[0]
        assert guesses[0] == drawn[i]  # were the target the same as the draft
        assert len(set(guesses)) == RANKS
        assert left[i, guesses].sum() >= min(RANKS, left[i].sum()) / 2
    assert left.sum(dim=1).min() < RANKS


@pytest.mark.sampled
@pytest.mark.parametrize("down_weight", [1.0, 0.5, 0.0])
def test_rejection_draws_from_the_sigma_that_it_tells(down_weight: float) -> None:
    logits, rows, width = random_logits(7), sample_rows(7), 3
    draws = [
        Draw.of(row.params, row.position)._replace(width=width, down_weight=down_weight)
        for row in rows
    ]
    step, lines = guess(logits, draws)
    wire = step.sigma_of(lines.numpy()).wire().cpu()
    expected = draft_distribution(logits, rows, width, down_weight).double()
    torch.testing.assert_close(wire.double(), expected, rtol=2**-7, atol=1e-7)
    seeds = torch.tensor([signed64(row.params.seed) for row in rows])
    positions = torch.tensor([row.position for row in rows])
    drawn = draw_from(sigma_of(wire), seeds, positions, STREAM_DRAFT)
    assert lines[:, RANKS].tolist() == drawn.tolist()
    # The target's noise is its own: the likeliest are the best guesses, whatever filters say.
    assert lines[:, :RANKS].tolist() == logits.topk(RANKS).indices.tolist()


def test_of_equals_the_lower_ids_are_the_likeliest() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 1500 : 1500 + 40] = 2.0
    _, lines = guess(logits, [Draw(1, 0.0, 0)])
    assert lines[0, :RANKS].tolist() == list(range(1500, 1500 + RANKS))
    likeliest = sorted([*range(LIKELIEST - 40), *range(1500, 1540)])
    assert lines[0, RANKS + 1 : RANKS + 1 + LIKELIEST].tolist() == likeliest


def test_there_may_be_fewer_tokens_than_are_looked_at() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, [7, 900]] = torch.tensor([1.0, 2.0])
    logits[1] = torch.nan  # anything may follow, but a token
    step, lines = guess(logits, [Draw(1, 1.0, 0), Draw(1, 1.0, 0)])
    assert sorted(lines[0, :2].tolist()) == [7, 900]
    assert lines[0, 2:RANKS].tolist() == [-1] * (RANKS - 2)
    assert 0 <= int(step._best_of_row[1]) < VOCAB
