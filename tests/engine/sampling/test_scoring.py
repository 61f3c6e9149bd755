"""Scores of many rows are the log probabilities that the sampler finds row by row."""

import math

import pytest
import torch

from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.sampling.sampler import logprobs
from ssd_engine.sampling.scoring import score_tokens

ROWS, VOCAB = 9, 300


def make_logits() -> torch.Tensor:
    logits = 8 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1] = logits[1].round()  # ties, and -0
    logits[2] = 3.0
    logits[3, :7] = -math.inf
    return logits


@pytest.mark.parametrize("top_n", [0, 1, 20])
@pytest.mark.parametrize("vocab", [VOCAB, 12])
def test_they_are_the_samplers_to_the_bit(top_n: int, vocab: int) -> None:
    logits, tokens = make_logits()[:, :vocab], list(range(ROWS))
    reported = ReportedLogprobs(score_tokens(logits, tokens, top_n).numpy())
    expected = logprobs(logits, tokens, [min(top_n, vocab)] * ROWS)
    assert [reported.logprobs(row, top_n) for row in range(ROWS)] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_broken_logits_has_no_number_and_leaves_its_neighbours(bad: float) -> None:
    logits = make_logits()
    whole = score_tokens(logits, [5] * ROWS, 3)
    logits[4, 17] = bad
    broken = score_tokens(logits, [5] * ROWS, 3)
    others = [row for row in range(ROWS) if row != 4]
    assert math.isnan(broken[4, :1].view(torch.float32).item())
    assert torch.equal(broken[others], whole[others])
