"""From logits to tokens: each option against its oracle, each row on its own."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd_engine.errors import InputError
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.params import SamplingParams, check_sampling
from ssd_engine.sampling.reported import ReportedLogprobs
from ssd_engine.sampling.sampler import (
    SampleRow,
    adjust_logits,
    kept_tokens,
    logprobs,
    perturbed_scores,
    sample,
    target_distribution,
    warp_logits,
)
from ssd_engine.sampling.scoring import score_tokens
from tests.suite.scale import share

NEVER = float("-inf")


def params(seed: int = 1, **given: Any) -> SamplingParams:
    return SamplingParams(seed=seed, **given)


def row(
    prompt: list[int] | None = None, output: list[int] | None = None, **given: Any
) -> SampleRow:
    return SampleRow(params(**given), prompt or [0], output or [])


def random_logits(n: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


# Greedy

BEST = torch.tensor([[1.0, 2.0, 3.0, 2.5]])


@pytest.mark.parametrize(
    ("one", "token"),
    [
        (row(temperature=0.0, seed=3), 2),
        (row(temperature=0.0, seed=4), 2),
        (row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2), 2),
        (row(temperature=0.0, logit_bias=((2, -100.0),)), 3),
        (row([1], [2], temperature=0.0, presence_penalty=0.75), 3),
        (row([3], [2], temperature=0.0, repetition_penalty=2.0), 1),
    ],
)
def test_temperature_0_takes_the_best_token_after_bias_and_penalties(
    one: SampleRow, token: int
) -> None:
    assert sample(BEST, [one]) == [token]
    assert target_distribution(BEST, [one]).tolist() == [[i == token for i in range(4)]]


@pytest.mark.parametrize("others", [[], [row(seed=3)]], ids=["alone", "beside a random row"])
@pytest.mark.parametrize("at", [[3, 7], [0, 999], [512, 513, 514]])
def test_equal_logits_at_temperature_0_give_the_lowest_id(
    at: list[int], others: list[SampleRow]
) -> None:
    logits = random_logits(2, 1000)
    logits[0, at] = 50.0
    rows = [row(temperature=0.0), *others]
    assert sample(logits[: len(rows)], rows)[0] == at[0]


# Rows are independent

VARIED = [
    row(temperature=0.0),
    row(seed=2),
    row([5, 6], [7, 7], seed=2**64 - 1, temperature=0.7),
    row(seed=3, top_k=5),
    row(seed=4, top_p=0.6, temperature=1.5),
    row(seed=5, min_p=0.05),
    row([1, 2, 3], [4, 5, 4], seed=6, repetition_penalty=1.3, presence_penalty=0.5),
    row([1], [2] * 9, seed=7, frequency_penalty=0.2, top_k=50, top_p=0.9, min_p=0.01),
    row(seed=8, logit_bias=((3, 5.0), (0, -100.0)), temperature=0.3),
    row([9], [8, 9], temperature=0.0, repetition_penalty=1.5, logit_bias=((1, 2.0),)),
    row(seed=9, top_p=0.999, temperature=100.0),
    row(seed=10, temperature=1e-3),
]


@pytest.mark.parametrize("vocab", [64, 1001, 32_003])
def test_a_row_has_the_same_scores_alone_and_in_any_company(vocab: int) -> None:
    logits = random_logits(len(VARIED), vocab)
    alone = [
        perturbed_scores(logits[i : i + 1], [VARIED[i]])[0].double() for i in range(len(VARIED))
    ]
    generator, many = np.random.default_rng(0), share(1_000_000 // (1000 + vocab))
    # Where all are filtered, noise is drawn for the few tokens that are left.
    companies = [[3, 4, 5], *(generator.choice(12, generator.integers(1, 13)) for _ in range(many))]
    for chosen in companies:
        scores = perturbed_scores(logits[chosen], [VARIED[i] for i in chosen])
        for place, i in enumerate(chosen):
            assert torch.equal(scores[place].double(), alone[i])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), NEVER])
def test_a_row_of_broken_logits_does_not_touch_its_neighbours(bad: float) -> None:
    logits = random_logits(len(VARIED), 300)
    before = perturbed_scores(logits, VARIED)
    for i in range(len(VARIED)):
        broken = logits.clone()
        broken[i] = bad
        after = perturbed_scores(broken, VARIED)
        others = [j for j in range(len(VARIED)) if j != i]
        assert torch.equal(after[others], before[others])


def test_the_sample_is_the_token_with_the_highest_score() -> None:
    logits = random_logits(len(VARIED), 300)
    scores = perturbed_scores(logits, VARIED)
    assert sample(logits, VARIED) == scores.argmax(-1).tolist()
    allowed = target_distribution(logits, VARIED) > 0
    assert torch.equal(logits, random_logits(len(VARIED), 300))  # they are left as they were
    for i, one in enumerate(VARIED):
        if one.params.filters:
            assert torch.equal(scores[i].isfinite(), allowed[i])


def test_the_position_of_a_sample_counts_prompt_and_output() -> None:
    logits = torch.zeros(1, 1000)
    drawn = sample(logits, [row([1, 2, 3], [4, 5], seed=11)])
    assert drawn == sample(logits, [row([9], [8, 8, 8, 8], seed=11)])
    assert drawn != sample(logits, [row([1, 2, 3], [4], seed=11)])


# Which tokens are kept


def logs(*p: float) -> list[float]:
    return [math.log(each) for each in p]


EIGHTHS = logs(0.5, 0.25, 0.125, 0.125)


@pytest.mark.parametrize(
    ("logits", "given", "left"),
    [
        ([0.0, 3.0, 3.0, 1.0], dict(top_k=1), [1]),  # of equals the lower ids
        ([2.0, 5.0, 2.0, 2.0, 9.0], dict(top_k=3), [0, 1, 4]),
        ([0.0, -5.0, 3.0], dict(top_k=3), [0, 1, 2]),
        ([0.0, 1.0, 1.0, 0.5], dict(top_p=1e-45), [1]),
        ([0.0, 1.0, 1.0, 0.5], dict(top_p=0.01), [1]),
        (EIGHTHS, dict(top_p=0.45), [0]),  # up to the token that reaches the share
        (EIGHTHS, dict(top_p=0.55), [0, 1]),
        (EIGHTHS, dict(top_p=0.74), [0, 1]),
        (EIGHTHS, dict(top_p=0.76), [0, 1, 2]),
        (EIGHTHS, dict(top_p=0.9), [0, 1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], dict(top_p=0.5), [0, 1]),  # reached exactly
        (logs(0.4, 0.2, 0.2, 0.2), dict(top_k=2, top_p=0.6), [0]),  # of what top-k left
        (logs(0.4, 0.2, 0.2, 0.2), dict(top_p=0.5), [0, 1]),
        ([1.0, 4.0, 3.999, 4.0], dict(min_p=1.0), [1, 3]),
        (logs(0.02, 0.01, 0.0049, 0.009651), dict(min_p=0.5), [0, 1]),  # of the best
        (logs(0.02, 0.01, 0.0049, 0.009651), dict(min_p=0.48), [0, 1, 3]),
    ],
)
def test_a_filter_leaves_exactly(
    logits: list[float], given: dict[str, Any], left: list[int]
) -> None:
    assert kept_tokens(torch.tensor(logits), params(**given)).nonzero().flatten().tolist() == left


# transformers as the oracle


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    "given",
    [
        dict(top_k=1),
        dict(top_k=17),
        dict(top_p=0.1),
        dict(top_p=0.9),
        dict(min_p=0.02),
        dict(min_p=0.5),
        dict(top_k=40, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_filters_agree_with_transformers(given: dict[str, Any], temperature: float) -> None:
    logits = random_logits(50, 400, seed=3)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    for warper, name in ((TopKLogitsWarper, "top_k"), (TopPLogitsWarper, "top_p")):
        if name in given:
            expected = warper(given[name])(None, expected)
    if "min_p" in given:
        expected = MinPLogitsWarper(given["min_p"])(None, expected)
    warped = warp_logits(logits, [params(temperature=temperature, **given)] * 50)
    assert torch.equal(warped, expected)


# Penalties and bias


@pytest.mark.parametrize(
    ("logits", "one", "adjusted"),
    [
        # Presence and frequency count the output alone, repetition all that was said.
        (
            [0.0, 0.0, 0.0, 0.0],
            row([1, 1, 2], [2, 3, 3], presence_penalty=0.5, frequency_penalty=0.25),
            [0.0, 0.0, -0.75, -1.0],
        ),
        (
            [1.0, 1.0, 1.0, 1.0],
            row([1], presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0),
            [1.0, 0.5, 1.0, 1.0],
        ),
        # The bias comes first, then repetition, then the others.
        ([-1.0, 1.0], row([0], repetition_penalty=2.0, logit_bias=((0, 5.0),)), [2.0, 1.0]),
        ([4.0, 1.0], row([1], [0], repetition_penalty=2.0, presence_penalty=1.0), [1.0, 0.5]),
    ],
)
def test_penalties_and_bias_come_in_their_order(
    logits: list[float], one: SampleRow, adjusted: list[float]
) -> None:
    assert adjust_logits(torch.tensor([logits]), [one]).tolist() == [adjusted]


def test_what_is_banned_is_not_drawn_before_its_position() -> None:
    """Whatever else is asked for: no bias makes up for it."""
    logits = torch.tensor([[3.0, 9.0, 1.0, 2.0]]).repeat(3, 1)
    given = dict(temperature=0.0, banned=(1, 0), banned_until=4, logit_bias=((1, 100.0),))
    rows = [row([0, 0], output, **given) for output in ([], [1], [1, 1])]
    assert sample(logits, rows) == [3, 3, 1]


@pytest.mark.parametrize("given", [{}, {"top_k": 2}, {"top_p": 0.9}, {"repetition_penalty": 2.0}])
def test_a_ban_leaves_the_distribution_of_the_other_tokens(given: dict[str, Any]) -> None:
    """As if the model had no such tokens."""
    logits, banned = random_logits(1, 50), (7, 3, 49)
    left = [token for token in range(50) if token not in banned]
    fewer = target_distribution(logits[:, left], [row([0], [2], **given)])
    p = target_distribution(logits, [row([0], [2], banned=banned, banned_until=99, **given)])
    assert torch.equal(p[:, list(banned)], torch.zeros(1, 3, dtype=p.dtype))
    assert torch.allclose(p[:, left], fewer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafts_first_guess_is_what_bans_leave(temperature: float) -> None:
    """Were the target the same as the draft: before the position and at it."""
    logits = random_logits(1, 50)
    likeliest = tuple(logits[0].topk(20).indices.tolist())
    bans = dict(temperature=temperature, banned=likeliest, banned_until=9)
    for length in (8, 9):
        one = row([0] * length, [], **bans)
        (guesses,) = ranked_guesses(logits, [one], 5)
        assert guesses[:1] == sample(logits, [one])
        assert (guesses[0] in likeliest) == (length == 9)


# Log probabilities


@given(st.integers(0, 2**32), st.sampled_from([0, 5, 20]))
@settings(max_examples=share(300), derandomize=True, deadline=None)
def test_logprobs_are_the_models_own_as_many_as_each_row_asks_for(seed: int, top_n: int) -> None:
    logits = random_logits(2, 97, seed=seed)
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    tokens, wanted = [seed % 97, int(expected[1].argmax())], [top_n, 3]
    found = logprobs(logits, tokens, wanted)
    for line, value, token, count in zip(expected, found, tokens, wanted, strict=True):
        assert value.chosen == pytest.approx(line[token], abs=1e-5)
        ids = [i for i, _ in value.top]
        assert ids == np.argsort(-line)[:count].tolist()
        assert [v for _, v in value.top] == pytest.approx(line[ids], abs=1e-5)


# What is refused

BAD = [
    ("temperature", [-0.1, 1e-4, 100.5, math.nan, math.inf, -math.inf], "0 or in [0.001, 100]"),
    ("top_k", [-1, 1001], "[0, 1000]"),
    ("top_p", [0.0, -0.5, 1.001, math.nan, math.inf], "(0, 1]"),
    ("min_p", [-0.01, 1.01, math.nan, math.inf], "[0, 1]"),
    ("repetition_penalty", [0.0, 1e-3, -1.0, 100.5, math.nan, math.inf], "[0.01, 100]"),
    ("presence_penalty", [-100.5, 100.5, math.nan, math.inf, -math.inf], "[-100, 100]"),
    ("frequency_penalty", [-100.5, 100.5, math.nan, math.inf, -math.inf], "[-100, 100]"),
    ("logit_bias", [((0, v),) for v in (100.5, -101.0, math.nan, math.inf)], "[-100, 100]"),
    ("logit_bias", [((1000, 1.0),), ((-1, 1.0),), ((5, 1.0), (2**32, 0.0))], "[0, 1000)"),
    ("logit_bias", [tuple((i % 1000, 0.0) for i in range(1025))], "at most 1024"),
]


@pytest.mark.parametrize(
    ("name", "value", "bound"), [(name, value, bound) for name, vs, bound in BAD for value in vs]
)
def test_a_value_out_of_bounds_is_refused_by_field_and_bound(
    name: str, value: Any, bound: str
) -> None:
    with pytest.raises(InputError) as error:
        check_sampling(params(**{name: value}), vocab_size=1000)
    assert error.value.field == f"sampling.{name}"
    assert bound in error.value.problem


GOOD = [
    ("temperature", [0.0, -0.0, 1e-3, 100.0]),
    ("top_k", [0, 1, 1000]),
    ("top_p", [1e-9, 1.0]),
    ("min_p", [0.0, 1.0]),
    ("repetition_penalty", [0.01, 1.0, 100.0]),
    ("presence_penalty", [-100.0, 100.0]),
    ("frequency_penalty", [-100.0, 100.0]),
    ("logit_bias", [(), ((0, -100.0), (999, 100.0)), tuple((i, 0.0) for i in range(1000))]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, vs in GOOD for value in vs])
def test_a_value_at_its_bound_is_served(name: str, value: Any) -> None:
    wanted = params(**{name: value})
    check_sampling(wanted, vocab_size=1000)
    logits = random_logits(1, 1000)
    for one in (wanted, replace(wanted, temperature=1e-3), replace(wanted, top_p=0.9)):
        p = target_distribution(logits, [SampleRow(one, [1, 2], [3, 3])])
        assert p.isfinite().all()
        assert p.sum().item() == pytest.approx(1.0)


# Scores of many rows


SCORED_ROWS, SCORED_VOCAB = 9, 300


def make_logits() -> torch.Tensor:
    logits = 8 * torch.randn(SCORED_ROWS, SCORED_VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1] = logits[1].round()  # ties, and -0
    logits[2] = 3.0
    logits[3, :7] = -math.inf
    return logits


@pytest.mark.parametrize("top_n", [0, 1, 20])
@pytest.mark.parametrize("vocab", [SCORED_VOCAB, 12])
def test_they_are_the_samplers_to_the_bit(top_n: int, vocab: int) -> None:
    logits, tokens = make_logits()[:, :vocab], list(range(SCORED_ROWS))
    reported = ReportedLogprobs(score_tokens(logits, tokens, top_n).numpy())
    expected = logprobs(logits, tokens, [min(top_n, vocab)] * SCORED_ROWS)
    assert [reported.logprobs(row, top_n) for row in range(SCORED_ROWS)] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_broken_logits_has_no_number_and_leaves_its_neighbours(bad: float) -> None:
    logits = make_logits()
    whole = score_tokens(logits, [5] * SCORED_ROWS, 3)
    logits[4, 17] = bad
    broken = score_tokens(logits, [5] * SCORED_ROWS, 3)
    others = [row for row in range(SCORED_ROWS) if row != 4]
    assert math.isnan(broken[4, :1].view(torch.float32).item())
    assert torch.equal(broken[others], whole[others])
