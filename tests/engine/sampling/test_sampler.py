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
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd_engine.errors import InputError
from ssd_engine.sampling.guesses import ranked_guesses
from ssd_engine.sampling.params import SamplingParams, check_sampling
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


def kept(logits: list[float], **given: Any) -> list[int]:
    return kept_tokens(torch.tensor(logits), params(**given)).nonzero().flatten().tolist()


# Greedy


def test_temperature_0_takes_the_most_likely_token() -> None:
    logits = random_logits(50, 1000)
    assert sample(logits, [row(temperature=0.0)] * 50) == logits.argmax(-1).tolist()


def test_temperature_0_does_not_depend_on_the_seed() -> None:
    logits = random_logits(1, 1000)
    drawn = {sample(logits, [row(temperature=0.0, seed=s)])[0] for s in range(20)}
    assert len(drawn) == 1


@pytest.mark.parametrize("other", [None, row(seed=3)], ids=["alone", "beside a random row"])
@pytest.mark.parametrize("at", [[3, 7], [0, 999], [512, 513, 514]])
def test_equal_logits_at_temperature_0_give_the_lowest_id(
    at: list[int], other: SampleRow | None
) -> None:
    logits = random_logits(2, 1000)
    logits[0, at] = 50.0
    rows = [row(temperature=0.0)] + ([other] if other else [])
    assert sample(logits[: len(rows)], rows)[0] == at[0]


def test_filters_do_not_change_what_temperature_0_takes() -> None:
    logits = random_logits(1, 100)
    filtered = row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)
    assert sample(logits, [filtered]) == [logits.argmax().item()]
    p = target_distribution(logits, [filtered])
    assert p.sum() == p[0, logits.argmax()] == 1.0


def test_the_distribution_at_temperature_0_is_one_token() -> None:
    logits = random_logits(1, 100)
    p = target_distribution(logits, [row(temperature=0.0)])[0]
    assert p.nonzero().flatten().tolist() == [logits.argmax().item()]
    assert p.max() == 1.0


def test_temperature_0_takes_the_best_token_after_bias_and_penalties() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.5]])
    assert sample(logits, [row(temperature=0.0, logit_bias=((2, -100.0),))]) == [3]
    assert sample(logits, [row([1], [2], temperature=0.0, presence_penalty=0.75)]) == [3]
    assert sample(logits, [row([3], [2], temperature=0.0, repetition_penalty=2.0)]) == [1]


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
    generator = np.random.default_rng(0)
    for _ in range(share(1_000_000 // (1000 + vocab))):
        chosen = generator.choice(len(VARIED), size=generator.integers(1, len(VARIED) + 1))
        scores = perturbed_scores(logits[chosen], [VARIED[i] for i in chosen])
        for place, i in enumerate(chosen):
            assert torch.equal(scores[place].double(), alone[i])


def test_rows_that_are_all_filtered_have_the_scores_they_have_beside_one_that_is_not() -> None:
    """Noise is drawn for the few tokens that are left, or for all: the same values."""
    logits = random_logits(4, 5000)
    filtered = [row(seed=3, top_k=40), row(seed=4, top_p=0.5), row(seed=5, min_p=0.1)]
    together = perturbed_scores(logits, [*filtered, row(seed=6)])
    assert torch.equal(perturbed_scores(logits[:3], filtered), together[:3])


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


def test_sampling_leaves_its_input_as_it_was() -> None:
    logits = random_logits(len(VARIED), 300)
    copy = logits.clone()
    sample(logits, VARIED)
    target_distribution(logits, VARIED)
    logprobs(logits, [0] * len(VARIED), [3] * len(VARIED))
    assert torch.equal(logits, copy)


def test_the_sample_is_the_token_with_the_highest_score() -> None:
    logits = random_logits(len(VARIED), 300)
    scores = perturbed_scores(logits, VARIED)
    assert sample(logits, VARIED) == scores.argmax(-1).tolist()
    allowed = target_distribution(logits, VARIED) > 0
    for i, one in enumerate(VARIED):
        if one.params.filters:
            assert torch.equal(scores[i].isfinite(), allowed[i])


def test_the_position_of_a_sample_counts_prompt_and_output() -> None:
    logits = torch.zeros(1, 1000)
    drawn = sample(logits, [row([1, 2, 3], [4, 5], seed=11)])
    assert drawn == sample(logits, [row([9], [8, 8, 8, 8], seed=11)])
    assert drawn != sample(logits, [row([1, 2, 3], [4], seed=11)])


# Which tokens are kept


def test_top_k_of_1_keeps_the_best_and_the_lowest_id_of_equals() -> None:
    assert kept([0.0, 3.0, 3.0, 1.0], top_k=1) == [1]


def test_top_k_cuts_a_tie_at_the_lower_ids() -> None:
    assert kept([2.0, 5.0, 2.0, 2.0, 9.0], top_k=3) == [0, 1, 4]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=30), st.integers(1, 30))
@settings(max_examples=share(2000), derandomize=True, deadline=None)
def test_top_k_among_many_ties_keeps_the_best_and_of_equals_the_lower_ids(
    logits: list[int], top_k: int
) -> None:
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top_k = min(top_k, len(logits))
    assert kept([float(x) for x in logits], top_k=top_k) == sorted(best_first[:top_k])


def test_top_k_of_the_whole_vocabulary_keeps_everything() -> None:
    assert kept([0.0, -5.0, 3.0], top_k=3) == [0, 1, 2]


@pytest.mark.parametrize("top_p", [1e-45, 1e-9, 0.01])
def test_a_tiny_top_p_keeps_one_token(top_p: float) -> None:
    assert kept([0.0, 1.0, 1.0, 0.5], top_p=top_p) == [1]


def test_top_p_keeps_the_token_that_reaches_the_share_and_none_after_it() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert kept(logits, top_p=0.45) == [0]
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.74) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]
    assert kept(logits, top_p=0.9) == [0, 1, 2, 3]


def test_top_p_stops_where_the_share_is_reached_exactly() -> None:
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.2, 0.2, 0.2)]
    assert kept(logits, top_k=2, top_p=0.6) == [0]
    assert kept(logits, top_p=0.5) == [0, 1]


def test_min_p_of_1_keeps_every_maximum() -> None:
    assert kept([1.0, 4.0, 3.999, 4.0], min_p=1.0) == [1, 3]


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = [math.log(p) for p in (0.02, 0.01, 0.0049, 0.9651 / 100)]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.48) == [0, 1, 3]


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


@pytest.mark.parametrize("penalty", [0.5, 1.3, 100.0])
def test_the_repetition_penalty_agrees_with_transformers(penalty: float) -> None:
    logits = random_logits(20, 50, seed=4)
    generator = np.random.default_rng(4)
    history = [generator.integers(0, 50, size=12).tolist() for _ in range(20)]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor(history), logits.clone())
    rows = [row(h[:8], h[8:], repetition_penalty=penalty) for h in history]
    assert torch.equal(adjust_logits(logits, rows), expected)


# Penalties and bias


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    logits = torch.zeros(1, 5)
    one = row([1, 1, 2], [2, 3, 3], presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust_logits(logits, [one]).tolist() == [[0.0, 0.0, -0.75, -1.0, 0.0]]


def test_penalties_without_output_touch_nothing_but_repetition() -> None:
    logits = torch.ones(1, 4)
    one = row([1], [], presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    assert adjust_logits(logits, [one]).tolist() == [[1.0, 0.5, 1.0, 1.0]]


def test_bias_is_added_before_the_repetition_penalty() -> None:
    logits = torch.tensor([[-1.0, 1.0]])
    one = row([0], [], repetition_penalty=2.0, logit_bias=((0, 5.0),))
    assert adjust_logits(logits, [one]).tolist() == [[2.0, 1.0]]


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


def test_repetition_is_penalised_before_presence_and_frequency() -> None:
    logits = torch.tensor([[4.0, 1.0]])
    one = row([1], [0], repetition_penalty=2.0, presence_penalty=1.0)
    assert adjust_logits(logits, [one]).tolist() == [[1.0, 0.5]]


# Log probabilities


@given(st.integers(0, 2**32), st.sampled_from([1, 5, 20]))
@settings(max_examples=share(300), derandomize=True, deadline=None)
def test_logprobs_are_the_models_own(seed: int, top_n: int) -> None:
    logits = random_logits(2, 97, seed=seed)
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    tokens = [seed % 97, int(expected[1].argmax())]
    for line, value, token in zip(
        expected, logprobs(logits, tokens, [top_n] * 2), tokens, strict=True
    ):
        assert value.chosen == pytest.approx(line[token], abs=1e-5)
        ids = [i for i, _ in value.top]
        assert ids == np.argsort(-line)[:top_n].tolist()
        assert [v for _, v in value.top] == pytest.approx(line[ids], abs=1e-5)


def test_each_row_has_as_many_top_logprobs_as_it_asked_for() -> None:
    values = logprobs(random_logits(3, 20), [0, 1, 2], [0, 4, 20])
    assert [len(value.top) for value in values] == [0, 4, 20]


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


@pytest.mark.parametrize("given", [dict(repetition_penalty=1e-40), dict(repetition_penalty=1e-37)])
def test_a_repetition_penalty_is_refused_or_leaves_a_distribution(given: dict[str, float]) -> None:
    wanted = params(temperature=1e-3, top_p=0.9, **given)
    try:
        check_sampling(wanted, vocab_size=4)
    except InputError:
        return
    p = target_distribution(torch.tensor([[0.5, 3.0, 2.0, 1.0]]), [SampleRow(wanted, [2], [3])])
    assert p.isfinite().all()
