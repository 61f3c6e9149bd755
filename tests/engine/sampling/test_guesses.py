"""Guesses where a draft does not know every token: heads have a vocabulary of their own."""

import numpy as np
import pytest
import torch

from ssd_engine.sampling.guesses import NO_GUESS, drawn_guesses, ranked_guesses
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow

VOCAB, KNOWN = 64, 40


def logits() -> torch.Tensor:
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
def test_of_what_a_grammar_allows_only_what_is_known_is_guessed(temperature: float) -> None:
    some, none = row(temperature, [7, 50, 51]), row(temperature, [50, 51])
    both = torch.cat((logits(), logits()))
    for count in (1, 17):
        assert ranked_guesses(both, [none, some], count) == [[], [7]]
    tokens, wire = drawn_guesses(both, [none, some], [2, 2], [0.5, 0.5])
    assert tokens == [NO_GUESS, 7]
    assert wire.isfinite().all()
    assert wire[1].nonzero().flatten().tolist() == [7]


def test_where_all_that_is_known_is_banned_nothing_is_guessed() -> None:
    params = SamplingParams(seed=3, banned=tuple(range(KNOWN)), banned_until=6)
    ending, going_on = (SampleRow(params, (), range(count)) for count in (5, 6))
    both = torch.cat((logits(), logits()))
    first, second = ranked_guesses(both, [ending, going_on], 3)
    assert (first, len(second)) == ([], 3)
    tokens, _ = drawn_guesses(both, [ending, going_on], [2, 2], [0.5, 0.5])
    assert tokens[0] == NO_GUESS
    assert 0 <= tokens[1] < KNOWN
