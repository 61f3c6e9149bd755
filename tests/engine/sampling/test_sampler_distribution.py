"""Samples follow the exact probabilities, alone and jointly; biased samplers do not pass.

A *check* draws tokens (or noise) through the real sampler and returns a p-value. The sampler must
pass every check; every biased sampler must fail its own, with no more draws. Seeds are fixed,
so a result never changes from run to run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ssd_engine.sampling import noise
from ssd_engine.sampling import sampler as sampling
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from tests import fits
from tests.fits import Floats, Ints
from tests.suite.scale import full_only, share

PASSES = 1e-6  # the sampler's p-values are above
REJECTED = 1e-9  # those of biased samplers are below
Check = Callable[[int], float]  # number of draws -> p-value
# Statistics

fit = partial(fits.fit, statistic="log-likelihood")  # sees what is rare


def joint_fit(first: Ints, second: Ints, p: Floats) -> float:
    """p-value that pairs come from p times p: each one right, and independent."""
    return fit(first * p.size + second, np.outer(p, p).ravel())


def worst(p_values: Sequence[float]) -> float:
    """The smallest, corrected for having been chosen."""
    return min(1.0, min(p_values) * len(p_values))


# Drawing


def random_bits(n: int, bits: int, salt: int) -> list[int]:
    generator = np.random.default_rng([salt, bits])
    return [int(x) >> (64 - bits) for x in generator.integers(0, 2**64, n, dtype=np.uint64)]


def draw(logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row, all from the same logits."""
    size = max(1, min(512, 2**21 // logits.size))
    line = torch.tensor(logits, dtype=torch.float32)[None]
    tokens: list[int] = []
    for begin in range(0, len(rows), size):
        batch = rows[begin : begin + size]
        tokens += sampling.sample(line.expand(len(batch), -1).contiguous(), batch)
    return np.array(tokens)


def plain_rows(seeds: Sequence[int], positions: Sequence[int]) -> list[SampleRow]:
    """Without options; a prompt that is only as long as the position says."""
    return [
        SampleRow(SamplingParams(seed=s), range(p), ())
        for s, p in zip(seeds, positions, strict=True)
    ]


# The exact probabilities of every sampling option

OPTION_LOGITS = np.round(np.random.default_rng(5).normal(0, 1.5, 24), 3)
OPTION_LOGITS[[4, 9]] = OPTION_LOGITS[21]  # equal logits, so that ties are met
PROMPT, OUTPUT = [13, 8, 8, 6], [3, 21, 3, 19, 3]


def option_row(given: dict[str, Any], seed: int, extra: int) -> SampleRow:
    """The prompt is made longer without changing which tokens it has."""
    return SampleRow(SamplingParams(seed, **given), PROMPT + [PROMPT[0]] * extra, OUTPUT)


def exact_distribution(given: dict[str, Any]) -> Floats:
    """The documented order in plain arithmetic: bias, penalties, temperature, k, p, min-p."""
    x, params = OPTION_LOGITS.tolist(), SamplingParams(0, **given)
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(OUTPUT):
        x[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    x = [value / params.temperature for value in x]
    best_first = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k:
        best_first = best_first[: params.top_k]
    weight = {token: math.exp(x[token] - x[best_first[0]]) for token in best_first}
    kept = best_first
    if params.top_p < 1:
        total, before, kept = sum(weight.values()), 0.0, []
        for token in best_first:
            if before >= params.top_p * total:
                break
            kept.append(token)
            before += weight[token]
    kept = [token for token in kept if weight[token] >= params.min_p]
    p = np.zeros(len(x))
    p[kept] = [weight[token] for token in kept]
    return p / p.sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature 0.3": dict(temperature=0.3),
    "temperature 2": dict(temperature=2.0),
    "top-k": dict(top_k=7),
    "top-k at a tie": dict(top_k=int(np.sum(OPTION_LOGITS[4] < OPTION_LOGITS)) + 2),
    "top-p": dict(top_p=0.8),
    "top-p, hot": dict(top_p=0.8, temperature=2.0),
    "min-p": dict(min_p=0.1),
    "min-p, hot": dict(min_p=0.1, temperature=2.0),
    "repetition penalty": dict(repetition_penalty=1.7),
    "repetition reward": dict(repetition_penalty=0.6),
    "presence penalty": dict(presence_penalty=0.9),
    "frequency penalty": dict(frequency_penalty=0.6),
    "logit bias": dict(logit_bias=((0, 1.5), (5, -2.0), (23, 0.75), (8, -100.0))),
    "all": dict(
        temperature=1.4,
        top_k=14,
        top_p=0.9,
        min_p=0.08,
        repetition_penalty=1.2,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((0, 1.0), (19, 1.5), (5, -2.0)),
    ),
}


def option_check(given: dict[str, Any], salt: int) -> Check:
    def check(n: int) -> float:
        seeds = random_bits(n, 64, salt)
        rows = [option_row(given, seed, extra=i % 61) for i, seed in enumerate(seeds)]
        return fit(draw(OPTION_LOGITS, rows), exact_distribution(given))

    return check


# Neighbours: what could be correlated

JOINT_P = np.array([0.3, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02])
JOINT_LOGITS = np.log(JOINT_P)


def consecutive_positions(n: int) -> float:
    return fit(draw(JOINT_LOGITS, plain_rows([77] * n, range(n))), JOINT_P)


def consecutive_seeds(n: int) -> float:
    return fit(draw(JOINT_LOGITS, plain_rows(range(n), [1000] * n)), JOINT_P)


Neighbour = Callable[[int, int], tuple[int, int]]  # (seed, position) -> the other one
MASK64 = 2**64 - 1

NEIGHBOURS: dict[str, Neighbour] = {
    "next position": lambda s, p: (s, p + 1),
    "position 16 on": lambda s, p: (s, p + 16),
    "position, high word": lambda s, p: (s, p + 2**32),
    "next seed": lambda s, p: ((s + 1) & MASK64, p),
    "seed, high word": lambda s, p: (s ^ 1 << 32, p),
    "seed, highest bit": lambda s, p: (s ^ 1 << 63, p),
    "seed, words swapped": lambda s, p: (s >> 32 | (s & 2**32 - 1) << 32, p),
    "next seed, position before": lambda s, p: ((s + 1) & MASK64, p - 1),
}


def neighbour_check(other: Neighbour) -> Check:
    def check(n: int) -> float:
        seeds = random_bits(n, 64, salt=2)
        positions = [1 + p for p in random_bits(n, 17, salt=3)]
        pairs = [other(s, p) for s, p in zip(seeds, positions, strict=True)]
        first = draw(JOINT_LOGITS, plain_rows(seeds, positions))
        second = draw(JOINT_LOGITS, plain_rows(*zip(*pairs, strict=True)))
        return joint_fit(first, second, JOINT_P)

    return check


# The noise of the tokens of one vocabulary

VOCAB = 150_000
TOKEN_LAGS = (1, 2, 256, 2**15, 2**16, 2**17)


def uniforms(rows: int, salt: int) -> Floats:
    """The u of the noise of every token: [rows, VOCAB], uniform when the noise is Gumbel."""
    seeds = [noise.signed64(seed) for seed in random_bits(rows, 64, salt)]
    columns = torch.tensor(seeds)[:, None], torch.tensor(random_bits(rows, 20, salt))[:, None]
    values = [sampling.gumbel(*columns, piece[None]) for piece in torch.arange(VOCAB).split(5000)]
    return np.asarray(torch.exp(-torch.exp(-torch.cat(values, dim=1))).numpy())


def noise_marginal(n: int) -> float:
    """u is uniform: in the large, and towards 1, where rare tokens are decided."""
    u = uniforms(-(-n // VOCAB), salt=4).ravel()
    edges = np.array([*np.linspace(0, 0.5, 33), *(1 - 0.5 ** np.arange(2, 22)), 1.0])
    cells = np.searchsorted(edges, u, side="right") - 1
    return fit(np.minimum(cells, edges.size - 2), np.diff(edges))


def noise_of_neighbouring_tokens(n: int) -> float:
    """Pairs of tokens in one row: on an 8 by 8 grid, and by rank correlation."""
    u = uniforms(-(-n // VOCAB), salt=5)
    results = []
    for lag in TOKEN_LAGS:
        first, second = u[:, :-lag].ravel(), u[:, lag:].ravel()
        grid = np.minimum(first * 8, 7).astype(int), np.minimum(second * 8, 7).astype(int)
        results.append(joint_fit(*grid, np.full(8, 1 / 8)))
        # A uniform is its own rank: 12 (u - 1/2)(v - 1/2) has mean 0 and variance 1.
        z = 12 * np.sum((first - 0.5) * (second - 0.5)) / math.sqrt(first.size)
        results.append(2 * float(stats.norm.sf(abs(z))))
    return worst(results)


# A vocabulary of 150,000

HEAD = 2000


def zipf_with_tail() -> Floats:
    """2,000 scattered Zipf tokens hold 87 %; each of the others is below 1e-6, falling by id."""
    head = np.random.default_rng(6).permutation(VOCAB)[:HEAD]
    p = 1.0 / np.sqrt(np.arange(VOCAB) + 300_000.0)
    p[head] = 0.0
    p *= 0.13 / p.sum()
    zipf = 1.0 / (np.arange(HEAD) + 3.0)
    p[head] = 0.87 * zipf / zipf.sum()
    return p


LARGE = {"tail": zipf_with_tail(), "flat": np.full(VOCAB, 1 / VOCAB)}


def large_draws(p: Floats, n: int) -> Ints:
    rows = plain_rows(random_bits(n, 64, salt=7), random_bits(n, 17, salt=8))
    return draw(np.log(p), rows)


def cells_fit(draws: Ints, p: Floats, cell_of: Ints) -> float:
    """Fit of draws that are told apart by cell_of[token] only."""
    return fit(cell_of[draws], np.bincount(cell_of, weights=p))


def holds_grid_point(p: Floats, bits: int) -> Ints:
    """1 where a token's piece of the cumulative distribution holds a multiple of 2^-bits."""
    grid = np.floor(np.cumsum(p) * 2.0**bits)
    return (np.diff(grid, prepend=-1) > 0).astype(int)


def large_check(p: Floats) -> Check:
    """Each id region has its share of likely and of unlikely tokens; no coarse grid shows."""
    ids = np.arange(VOCAB)
    likely = (p > 1e-6).astype(int)
    partitions = [
        likely,
        likely * 5 + ids // 30_000,
        ids // 1000,
        likely * 3 + ids // 2**16,
        likely * 64 + ids % 64,
        *(holds_grid_point(p, bits) for bits in (8, 12, 16)),
    ]

    def check(n: int) -> float:
        draws = large_draws(p, n)
        return worst([cells_fit(draws, p, cell_of) for cell_of in partitions])

    return check


@dataclass(frozen=True)
class Sized:
    """A check and the number of draws, in full mode, that the sampler must pass."""

    check: Check
    draws: int


CHECKS: dict[str, Sized] = {
    **{
        f"option: {name}": Sized(option_check(options, salt), 12_000)
        for salt, (name, options) in enumerate(OPTIONS.items(), start=100)
    },
    "consecutive positions": Sized(consecutive_positions, 100_000),
    "consecutive seeds": Sized(consecutive_seeds, 100_000),
    **{
        f"joint: {name}": Sized(neighbour_check(other), 40_000)
        for name, other in NEIGHBOURS.items()
    },
    "noise": Sized(noise_marginal, 150 * VOCAB),
    "noise of neighbouring tokens": Sized(noise_of_neighbouring_tokens, 60 * VOCAB),
    "large: tail": Sized(large_check(LARGE["tail"]), 1500),
    "large: flat": Sized(large_check(LARGE["flat"]), 600),
}


@pytest.mark.parametrize(
    "name", [full_only(name) if name == "large: tail" else name for name in CHECKS]
)
def test_samples_follow_the_exact_probabilities(name: str) -> None:
    sized = CHECKS[name]
    assert sized.check(share(sized.draws)) > PASSES


@pytest.mark.parametrize("name", OPTIONS)
def test_the_target_distribution_is_the_exact_one(name: str) -> None:
    logits = torch.tensor(OPTION_LOGITS, dtype=torch.float32)[None]
    p = target_distribution(logits, [option_row(OPTIONS[name], seed=1, extra=0)])[0].numpy()
    exact = exact_distribution(OPTIONS[name])
    assert p == pytest.approx(exact, rel=1e-4, abs=0)
    assert ((p > 0) == (exact > 0)).all()


# Biased samplers

HONEST_SAMPLE, HONEST_WARP = sampling.sample, sampling.warp_logits

Patch = dict[str, Any]  # what takes the place of which name of ssd_engine.sampling.sampler


def words(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The generator's 32 bits behind the noise."""
    counter = (token, position & noise.MASK32, position >> 32, torch.zeros_like(token))
    return noise.philox(counter, (seed & noise.MASK32, seed >> 32 & noise.MASK32))[0]


def with_noise(biased: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Patch:
    def rows(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
        pieces = torch.arange(vocab_size).split(5000)
        columns = seed[:, None], position[:, None]
        return torch.cat([biased(*columns, piece[None]) for piece in pieces], dim=1)

    return {"gumbel": biased, "gumbel_rows": rows}


def with_rows(change: Callable[[SampleRow], SampleRow]) -> Patch:
    """The sampler as it is, asked for something else."""
    return {"sample": lambda logits, rows: HONEST_SAMPLE(logits, [change(row) for row in rows])}


def with_params(change: Callable[[SamplingParams], dict[str, Any]]) -> Patch:
    return with_rows(lambda row: replace(row, params=replace(row.params, **change(row.params))))


def sixteen_bits(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    u = ((words(seed, position, token) >> 16).double() + 0.5) * 2.0**-16
    return -torch.log(-torch.log(u))


def single_precision(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    u = (words(seed, position, token).float() + 0.5) * 2.0**-32  # may round to 1
    return (-torch.log(-torch.log(u))).double()


def inverse_cdf(bits: int) -> Patch:
    def biased(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        cdf = torch.softmax(logits[0].double(), dim=0).cumsum(0)
        seed = torch.tensor([noise.signed64(row.params.seed) for row in rows])
        position = torch.tensor([row.position for row in rows])
        x = words(seed, position, torch.zeros_like(seed)) >> (32 - bits)
        tokens: list[int] = torch.searchsorted(cdf, x * 2.0**-bits, right=True).tolist()
        return tokens

    return {"sample": biased}


def filtered_before_temperature(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    warped = HONEST_WARP(logits, [replace(p, temperature=1.0) for p in params])
    return warped / torch.tensor([p.temperature for p in params])[:, None]


def penalised_after_temperature(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    temperature = torch.tensor([row.params.temperature for row in rows])
    warm = [replace(row, params=replace(row.params, temperature=1.0)) for row in rows]
    return HONEST_SAMPLE(logits / temperature[:, None], warm)


def penalty_that_only_divides(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    out = logits.clone()
    for i, row in enumerate(rows):
        out[i, list({*row.prompt, *row.output})] /= row.params.repetition_penalty
    return out


def top_p_without_its_last_token(scaled: Tensor, params: SamplingParams) -> Tensor:
    ordered, order = torch.sort(torch.softmax(scaled.double(), dim=0), descending=True)
    kept = torch.zeros_like(scaled, dtype=torch.bool)
    kept[order[ordered.cumsum(0) <= params.top_p]] = True
    return kept


def min_p_of_the_whole(scaled: Tensor, params: SamplingParams) -> Tensor:
    p = torch.softmax(scaled.double(), dim=0)
    return (p >= params.min_p) | (p == p.max())


IGNORES_POSITION = with_noise(lambda s, p, t: noise.gumbel(s, p * 0, t))
IGNORES_TOKEN = with_noise(lambda s, p, t: noise.gumbel(s, p, t * 0))
SHORT_TOKEN = with_noise(lambda s, p, t: noise.gumbel(s, p, t % 2**16))
SIXTEEN_BITS = with_noise(sixteen_bits)
TOO_HOT = with_params(lambda p: dict(temperature=p.temperature * 1.15))
PROMPT_FORGOTTEN = with_rows(lambda row: replace(row, prompt=[OUTPUT[0]] * len(row.prompt)))

# (what is wrong, the sampler, the check that must see it, draws)
BIASED: list[tuple[str, Patch, str, int]] = [
    ("noise of every token the same", IGNORES_TOKEN, "option: none", 300),
    ("uniform of 6 bits", inverse_cdf(6), "option: none", 1500),
    ("too hot by 15 %", TOO_HOT, "option: temperature 0.3", 6000),
    ("too hot by 15 %", TOO_HOT, "option: temperature 2", 12_000),
    ("one more", with_params(lambda p: dict(top_k=p.top_k + 1)), "option: top-k", 1500),
    ("one fewer", with_params(lambda p: dict(top_k=p.top_k - 1)), "option: top-k", 1500),
    ("ties kept", with_params(lambda p: dict(top_k=p.top_k + 1)), "option: top-k at a tie", 1500),
    ("last token dropped", {"kept_tokens": top_p_without_its_last_token}, "option: top-p", 1500),
    (
        "temperature after top-p",
        {"warp_logits": filtered_before_temperature},
        "option: top-p, hot",
        1500,
    ),
    ("not relative", {"kept_tokens": min_p_of_the_whole}, "option: min-p", 1500),
    (
        "temperature after min-p",
        {"warp_logits": filtered_before_temperature},
        "option: min-p, hot",
        1500,
    ),
    ("prompt forgotten", PROMPT_FORGOTTEN, "option: repetition penalty", 1500),
    (
        "negative logits divided",
        {"adjust_logits": penalty_that_only_divides},
        "option: repetition penalty",
        4000,
    ),
    ("prompt forgotten", PROMPT_FORGOTTEN, "option: repetition reward", 1500),
    (
        "counted each time",
        with_params(lambda p: dict(presence_penalty=0.0, frequency_penalty=p.presence_penalty)),
        "option: presence penalty",
        4000,
    ),
    (
        "counted once",
        with_params(lambda p: dict(frequency_penalty=0.0, presence_penalty=p.frequency_penalty)),
        "option: frequency penalty",
        4000,
    ),
    (
        "prompt counted",
        with_rows(lambda row: replace(row, prompt=(), output=[*row.prompt, *row.output])),
        "option: frequency penalty",
        1500,
    ),
    (
        "no negative bias",
        with_params(lambda p: dict(logit_bias=tuple(b for b in p.logit_bias if b[1] > 0))),
        "option: logit bias",
        1500,
    ),
    ("penalties after temperature", {"sample": penalised_after_temperature}, "option: all", 1500),
    ("position ignored", IGNORES_POSITION, "consecutive positions", 300),
    ("position ignored", IGNORES_POSITION, "joint: next position", 300),
    (
        "position of 4 bits",
        with_noise(lambda s, p, t: noise.gumbel(s, p & 15, t)),
        "joint: position 16 on",
        300,
    ),
    (
        "position of 32 bits",
        with_noise(lambda s, p, t: noise.gumbel(s, p & noise.MASK32, t)),
        "joint: position, high word",
        300,
    ),
    (
        "seed ignored",
        with_noise(lambda s, p, t: noise.gumbel(s * 0, p, t)),
        "consecutive seeds",
        300,
    ),
    (
        "seed halved",
        with_noise(lambda s, p, t: noise.gumbel(s >> 1, p, t)),
        "joint: next seed",
        600,
    ),
    (
        "seed of 32 bits",
        with_noise(lambda s, p, t: noise.gumbel(s & noise.MASK32, p, t)),
        "joint: seed, high word",
        300,
    ),
    (
        "seed of 63 bits",
        with_noise(lambda s, p, t: noise.gumbel(s & 2**63 - 1, p, t)),
        "joint: seed, highest bit",
        300,
    ),
    (
        "seed folded to 32 bits",
        with_noise(lambda s, p, t: noise.gumbel((s ^ s >> 32) & noise.MASK32, p, t)),
        "joint: seed, words swapped",
        300,
    ),
    (
        "seed and position added",
        with_noise(lambda s, p, t: noise.gumbel(s + p, p * 0, t)),
        "joint: next seed, position before",
        300,
    ),
    ("u of 16 bits", SIXTEEN_BITS, "noise", 30 * VOCAB),
    ("noise of every token the same", IGNORES_TOKEN, "noise of neighbouring tokens", VOCAB),
    ("token of 16 bits", SHORT_TOKEN, "noise of neighbouring tokens", VOCAB),
    (
        "tokens share noise in pairs",
        with_noise(lambda s, p, t: noise.gumbel(s, p, t // 2)),
        "noise of neighbouring tokens",
        VOCAB,
    ),
    ("u of 16 bits", SIXTEEN_BITS, "large: tail", 190),
    ("uniform of 16 bits", inverse_cdf(16), "large: tail", 190),
    ("token of 16 bits", SHORT_TOKEN, "large: flat", 80),
    ("uniform of 16 bits", inverse_cdf(16), "large: flat", 80),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("patch", "check", "draws"),
    [pytest.param(*case[1:], id=f"{case[2]}: {case[0]}") for case in BIASED],
)
def test_a_biased_sampler_is_rejected(
    patch: Patch, check: str, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in patch.items():
        monkeypatch.setattr(sampling, name, value)
    assert CHECKS[check].check(draws) < REJECTED


def test_every_check_rejects_some_biased_sampler_with_fewer_draws_than_it_may_have() -> None:
    assert {check for _, _, check, _ in BIASED} == CHECKS.keys()
    assert all(draws <= CHECKS[check].draws for _, _, check, draws in BIASED)


# The largest noise there is. Positions, with seed EXTREME_SEED, found by search: in each of them a
# token of the vocabulary has one of the 128 largest of the 2^32 words (1 row in 222 has one).
EXTREME_SEED = 20260
EXTREME_POSITIONS = (406, 927, 1186, 1592, 1662, 2055, 2136, 2192, 2320, 2952)


def unlikely_tokens_drawn_at_extremes() -> int:
    """Draws, in these rows, of tokens with a probability of 1e-12 each."""
    p = np.full(VOCAB, 1e-12)
    p[0] = 1 - p[1:].sum()
    n = len(EXTREME_POSITIONS)
    return int(np.count_nonzero(draw(np.log(p), plain_rows([EXTREME_SEED] * n, EXTREME_POSITIONS))))


def test_the_largest_noise_does_not_carry_a_token_of_probability_1e_12() -> None:
    seed, position = torch.tensor(EXTREME_SEED), torch.tensor(EXTREME_POSITIONS)
    highest = words(seed, position[:, None], torch.arange(VOCAB)[None]).amax(dim=1)
    assert (highest >= 2**32 - 128).all()
    assert unlikely_tokens_drawn_at_extremes() == 0


def test_noise_in_single_precision_is_rejected_at_the_extremes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in with_noise(single_precision).items():
        monkeypatch.setattr(sampling, name, value)
    assert unlikely_tokens_drawn_at_extremes() == len(EXTREME_POSITIONS)
