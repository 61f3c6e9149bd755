"""Guesses where a draft does not know every token: heads have a vocabulary of their own."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ssd_engine.sampling.guesses import drawn_guesses, ranked_guesses
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow

VOCAB, KNOWN = 64, 40


def logits() -> Tensor:
    found = torch.full((1, VOCAB), float("-inf"))
    found[0, :KNOWN] = torch.randn(KNOWN, generator=torch.Generator().manual_seed(1))
    return found


def row(temperature: float, allowed: list[int] | None = None) -> SampleRow:
    bits = None
    if allowed is not None:
        chosen = np.isin(np.arange(VOCAB), allowed)
        bits = np.packbits(chosen, bitorder="little")
    return SampleRow(SamplingParams(seed=3, temperature=temperature), (), range(5), bits)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_is_not_known_is_no_guess(temperature: float, coupled: bool) -> None:
    (ranking,) = ranked_guesses(logits(), [row(temperature)], KNOWN + 10, coupled)
    assert sorted(ranking) == list(range(KNOWN))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("allowed", "expected"), [([7, 50, 51], [7]), ([50, 51], [50, 51])], ids=["some", "none"]
)
def test_what_a_grammar_allows_is_guessed_where_nothing_better_is_known(
    allowed: list[int], expected: list[int], temperature: float
) -> None:
    """What is known of it comes alone; where none of it is, all of it is alike."""
    for count in (1, 17):
        (ranking,) = ranked_guesses(logits(), [row(temperature, allowed)], count)
        assert set(ranking) <= set(expected)
        assert len(ranking) == min(count, len(expected))
    tokens, wire = drawn_guesses(logits(), [row(temperature, allowed)], [2], [0.5])
    assert tokens[0] in expected
    assert wire.float().sum().item() == pytest.approx(1.0, abs=0.01)
    assert not wire[0, [token for token in range(VOCAB) if token not in expected]].any()
