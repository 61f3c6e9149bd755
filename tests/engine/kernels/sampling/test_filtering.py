"""Filters on the device leave the tokens that the CPU's sampler leaves, ties and boundaries too."""

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd_engine.kernels.sampling import candidates, digit_search, filtering
from ssd_engine.kernels.sampling.filtering import CUT, Filters, scaled_value, survives
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import kept_tokens

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 128_256 if DEVICE.type == "cuda" else 300
ROWS = 4


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has several pieces, and takes every way to a cut."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(filtering, "PIECE", 128)
        for name, value in {"MOST": 64, "PAIRS": 16, "PAIRED": 8, "PROGRAMS": 2 * ROWS}.items():
            monkeypatch.setattr(candidates, name, value)
        monkeypatch.setattr(digit_search, "PROGRAMS", 2 * ROWS)


@triton.jit
def _survivors_kernel(
    logits,
    temperatures,
    cuts,
    ties,
    out,
    vocab,
    pieces,
    PIECE: tl.constexpr,
    CUT: tl.constexpr,
    PIECES: tl.constexpr,
):
    row, piece = tl.program_id(1), tl.program_id(0)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < vocab
    value = scaled_value(logits, vocab, row, token, inside, temperatures)
    kept = survives(value, inside, row, piece, pieces, cuts, ties, CUT, PIECES)
    tl.store(out + row.to(tl.int64) * vocab + token, kept, mask=inside)


def survivors(logits: Tensor, params: list[SamplingParams]) -> tuple[Tensor, list[int]]:
    """[rows, VOCAB], and which rows were cut among few candidates."""

    def told(values: list[Any], kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=DEVICE)

    filters = Filters(len(params), VOCAB, DEVICE, overlap=False)
    temperatures = told([p.temperature for p in params], torch.float32)
    filters.find(
        logits,
        temperatures,
        told([p.top_k for p in params], torch.int32),
        told([p.top_p for p in params], torch.float64),
        told([math.log(p.min_p) if p.min_p else -math.inf for p in params], torch.float32),
    )
    out = torch.zeros(len(params), VOCAB, dtype=torch.bool, device=DEVICE)
    _survivors_kernel[(filters.pieces, len(params))](
        logits,
        temperatures,
        filters.cuts,
        filters.ties,
        out,
        VOCAB,
        filters.pieces,
        filtering.PIECE,
        CUT,
        filters.padded,
    )
    return out.cpu(), filters._candidates.solved.tolist()


def check(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    kept, solved = survivors(logits.to(DEVICE), params)
    for row, p in enumerate(params):
        expected = kept_tokens(logits[row] / torch.tensor(p.temperature), p)
        assert torch.equal(kept[row], expected), (p, int(kept[row].sum()), int(expected.sum()))
    return solved


KINDS = {
    "spread out": lambda x: 3 * x,
    "ties": lambda x: (2 * x).round(),
    "all alike": lambda x: torch.zeros_like(x),
    "sure of itself": lambda x: 30 * x,
}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_filters_leave_what_the_sampler_leaves(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    generator = torch.Generator().manual_seed(seed)
    logits = KINDS[kind](torch.randn(ROWS, VOCAB, generator=generator))
    logits[:, 7], logits[:, 5] = 0.0, -0.0  # which are the same
    params = [
        SamplingParams(
            seed=1,
            temperature=rng.choice((0.7, 1.0, 1.3)),
            top_k=rng.choice((0, 1, 5, 40, VOCAB)),
            top_p=rng.choice((1.0, 0.9, 0.5, 0.25, 1 / 3)),
            min_p=rng.choice((0.0, 0.0, 0.05, 0.5)),
        )
        for _ in range(ROWS)
    ]
    check(logits, params)


def test_a_cut_among_equals_goes_by_the_id() -> None:
    """Across pieces; where top-p is reached exactly, too."""
    logits = torch.full((ROWS, VOCAB), -50.0)
    logits[:, 100:104] = 1.0  # in two pieces
    logits[:, 140:144] = 1.0
    params = [
        SamplingParams(1, top_k=5),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, top_k=6, top_p=0.5),
        SamplingParams(1, top_p=0.75, min_p=0.9),
    ]
    kept, _ = survivors(logits.to(DEVICE), params)
    assert kept.sum(dim=1).tolist() == [5, 4, 3, 6]
    assert kept[1].nonzero()[:, 0].tolist() == [100, 101, 102, 103]
    check(logits, params)


def close_together(number: int) -> Tensor:
    """A row of so many likely tokens, which differ little and lie in all pieces."""
    row = torch.full((VOCAB,), -50.0)
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(number))[:number]
    row[tokens] = 5.0 - torch.arange(number) * (0.02 / number)
    return row


def test_rows_with_too_many_candidates_are_searched_digit_by_digit() -> None:
    """Next to rows that are not; the cut is the last candidate, or just beyond."""
    most = candidates.MOST
    full, over = close_together(most), close_together(most + 1)
    cases = [
        (full, SamplingParams(1, top_k=most - 1, top_p=0.9999), True),
        (full, SamplingParams(1, top_k=most), True),
        (full, SamplingParams(1, top_k=most, top_p=0.5), True),
        (full, SamplingParams(1, top_k=most + 1), False),
        (full, SamplingParams(1, top_p=0.9999), True),
        (over, SamplingParams(1, top_p=0.9999), False),
        (over, SamplingParams(1, top_k=5, top_p=0.5), False),
        (over, SamplingParams(1), True),
        (over, SamplingParams(1, min_p=0.99), True),
        (torch.zeros(VOCAB), SamplingParams(1, top_p=0.95), False),
    ]
    logits = torch.stack([row for row, _, _ in cases])
    assert check(logits, [p for _, p, _ in cases]) == [solved for _, _, solved in cases]


def test_tokens_without_mass() -> None:
    """Forbidden ones, and those whose mass is all but rounded to nothing."""
    forbidden = torch.full((VOCAB,), -math.inf)
    forbidden[10:200:10] = torch.arange(19.0)
    faint = torch.full((VOCAB,), -100.0)
    faint[3], faint[150:] = 0.0, -31.0
    cases = [
        (forbidden, SamplingParams(1, top_p=0.9)),
        (forbidden, SamplingParams(1, top_k=19, top_p=0.999999)),
        (forbidden, SamplingParams(1, top_k=25)),
        (faint, SamplingParams(1, top_p=1 - 2**-46)),
    ]
    check(torch.stack([row for row, _ in cases]), [p for _, p in cases])
