"""Rejection verification keeps the target's distribution; what breaks one of its rules does not.

Texts of four tokens are generated, round after round, by a target and a draft whose logits are
random tables over all histories; so the exact probability of every text is known. A simulation
meets hits and misses, branches cut by time, missing rows and n-gram guesses. Verification must
pass the same fits that every mutant must fail. Seeds are fixed: a result never changes.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ssd_engine.sampling import rejection
from ssd_engine.sampling.noise import (
    STREAM_DRAFT,
    signed64,
)
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.sampling.rejection import (
    SampledSpeculation,
    draft_distribution,
    draw_from,
    residual,
    saguaro,
    sigma_of,
    to_wire,
    verify_rejection,
)
from ssd_engine.sampling.sampler import SampleRow, target_distribution
from tests.fits import Floats, Ints, texts_fit
from tests.suite.scale import FULL, share

PASSES = 1e-4  # the p-values of the rules as they are lie above
REJECTED = 1e-6  # those of mutants below

VOCAB, LENGTH = 8, 4
PROMPT = [1, 5, 5]
# Histories are the nodes of a tree in heap order: the root is 0, child t of h is VOCAB * h + 1 + t.
LEAVES_BEGIN = (VOCAB**LENGTH - 1) // (VOCAB - 1)


def history(node: int) -> list[int]:
    tokens: list[int] = []
    while node:
        node, token = divmod(node - 1, VOCAB)
        tokens.append(token)
    return tokens[::-1]


# A small target and a small draft


@dataclass(frozen=True)
class World:
    """What target and draft say after each history: [LEAVES_BEGIN, VOCAB] each."""

    p: Tensor
    drawn_from: Tensor  # the distribution that the draft really uses
    shipped: Tensor  # and the one that it reports
    candidates: Tensor  # its guesses of t, best first: [LEAVES_BEGIN, FAN_OUT + 1]
    # Mutants of the simulation
    confident_only: float = 0.0  # the least probability of a token that is kept
    missing_is_accepted: bool = False
    ngram_is_drawn: bool = False


FAN_OUT = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "filters": dict(temperature=1.3, top_k=6, top_p=0.92, min_p=0.02),
    "penalties": dict(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias=((2, 1.0), (6, -1.5)),
    ),
    "greedy": dict(temperature=0.0),
}
# Distributions of target and draft that show a fault well; tokens are permuted in every history.
PERMUTED = {
    # The draft's favourite is often rejected, for a token that it liked or for one that it did not.
    "apart": (
        [0.4, 0.15, 0.15, 0.1, 0.1, 0.05, 0.03, 0.02],
        [0.3, 0.001, 0.001, 0.65, 0.012, 0.012, 0.012, 0.012],
    ),
    # Halfway between numbers of two bits: the first rounds down, all others up, by a tenth.
    "halfway": ([0.56, 0.1413, 0.1413, 0.0707, 0.0353, 0.0353, 0.0088, 0.0073],) * 2,
}


@cache
def logits(models: str) -> tuple[Tensor, Tensor]:
    """Of target and draft, in every history."""
    generator = torch.Generator().manual_seed(7)
    if models == "similar":
        target = 1.5 * torch.randn(LEAVES_BEGIN, VOCAB, generator=generator)
        return target, target + torch.randn(LEAVES_BEGIN, VOCAB, generator=generator)
    order = torch.rand(LEAVES_BEGIN, VOCAB, generator=generator).argsort(dim=1)
    target, draft = (torch.tensor(p).log()[order] for p in PERMUTED[models])
    return target, draft


@dataclass(frozen=True)
class Case:
    models: str = "similar"
    options: str = "none"
    down_weight: float = 1.0
    wire: torch.dtype = torch.bfloat16

    def rows(self) -> list[SampleRow]:
        params = SamplingParams(seed=0, **OPTIONS[self.options])
        return [SampleRow(params, PROMPT, history(node)) for node in range(LEAVES_BEGIN)]

    def world(self) -> World:
        target, draft = logits(self.models)
        rows = self.rows()
        shipped = draft_distribution(draft, rows, FAN_OUT, self.down_weight, self.wire)
        return World(
            p=target_distribution(target, rows),
            drawn_from=sigma_of(shipped),
            shipped=shipped,
            candidates=target_distribution(draft, rows).topk(FAN_OUT + 1).indices,
        )

    def unrounded(self) -> Tensor:
        """sigma before it is rounded to the wire dtype."""
        q = target_distribution(logits(self.models)[1], self.rows())
        return saguaro(q, FAN_OUT, self.down_weight)


def exact(p: Tensor) -> Floats:
    """The probability of every text of LENGTH tokens."""
    reach = np.ones(1)
    begin = 0
    for _ in range(LENGTH):
        reach = (reach[:, None] * p[begin : begin + reach.size].numpy()).ravel()
        begin = VOCAB * begin + 1
    return reach


# Generation, many sequences at once

DRAFT, NGRAM = 0, 1


def generate(world: World, n: int, salt: int) -> Ints:
    """Texts of n sequences, as numbers in base VOCAB."""
    time = np.random.default_rng([salt, 1])  # all that does not depend on any token's value
    bits = np.random.default_rng([salt, 2]).integers(0, 2**64, n, dtype=np.uint64)
    seeds = torch.from_numpy(bits.view(np.int64))
    node = torch.zeros(n, dtype=torch.int64)
    hit = torch.ones(n, dtype=torch.bool)
    length = torch.zeros(n, dtype=torch.int64)
    while (active := (length < LENGTH).nonzero()[:, 0]).numel():
        rounds = Rounds(world, seeds[active], node[active], length[active], hit[active], time)
        accepted, token = rounds.verify()
        node[active] = VOCAB * rounds.reached(accepted) + 1 + token
        length[active] += accepted + 1
        hit[active] = rounds.prepared(accepted, token)
    return node.numpy() - LEAVES_BEGIN


class Rounds:
    """One round of each sequence, vectorised over them: [n]."""

    def __init__(
        self,
        world: World,
        seeds: Tensor,
        node: Tensor,
        length: Tensor,
        hit: Tensor,
        time: np.random.Generator,
    ) -> None:
        n = seeds.numel()
        self.world, self.seeds = world, seeds
        self.position = len(PROMPT) + length
        chance = torch.from_numpy(time.random((3, n)))
        # A hit has a branch; a miss the backup: drafted just in time, n-gram, or nothing.
        self.source = torch.where(hit | (chance[0] < 0.3), DRAFT, NGRAM)
        nothing = ~hit & (chance[0] > 0.8)
        depth = torch.from_numpy(time.choice([3, 3, 3, 2, 1], n))
        self.depth = torch.where(nothing, 0, torch.minimum(depth, LENGTH - 1 - length))
        arrived = torch.where(chance[1] < 0.25, (chance[2] * self.depth).long(), self.depth)
        self.arrived = torch.where(self.source == DRAFT, arrived, self.depth)
        self._speculate(node)

    def _speculate(self, node: Tensor) -> None:
        nodes, tokens = [node], []
        for j in range(LENGTH - 1):
            node = node.clamp(max=LEAVES_BEGIN - 1)  # beyond any depth
            drawn = draw_from(
                self.world.drawn_from[node], self.seeds, self.position + j, STREAM_DRAFT
            )
            guessed = self.world.p[node].argmax(dim=-1)  # a function of the text, as an n-gram is
            tokens.append(torch.where(self.source == DRAFT, drawn, guessed))
            node = VOCAB * node + 1 + tokens[-1]
            nodes.append(node.clamp(max=LEAVES_BEGIN - 1))
        self.nodes = torch.stack(nodes, dim=1)  # [n, LENGTH]
        self.tokens = torch.stack(tokens, dim=1)  # [n, LENGTH - 1]
        if self.world.confident_only:
            q = self.world.drawn_from[self.nodes[:, :-1]].gather(2, self.tokens[..., None])[..., 0]
            kept = (q >= self.world.confident_only).long().cumprod(dim=1).sum(dim=1)
            self.depth = torch.where(
                self.source == DRAFT, torch.minimum(kept, self.depth), self.depth
            )

    def verify(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(LENGTH) <= self.depth[:, None]
        p = self.world.p[self.nodes[rows]]
        outcomes = verify_rejection(p, self._speculations())
        accepted, token = torch.tensor(outcomes).T
        return accepted, token

    def _speculations(self) -> list[SampledSpeculation]:
        known = self.depth if self.world.missing_is_accepted else self.arrived
        wire = self.world.shipped[self.nodes]
        if self.world.missing_is_accepted:  # sigma = p accepts everything
            missing = torch.arange(LENGTH) >= self.arrived[:, None]
            wire = torch.where(missing[..., None], self.world.p[self.nodes], wire.double())
        drawn = (self.source == DRAFT) | self.world.ngram_is_drawn
        columns = (self.seeds, self.position, self.depth, known, drawn)
        return [
            SampledSpeculation(seed % 2**64, position, tokens[:k], rows[:m] if is_drawn else None)
            for seed, position, k, m, is_drawn, tokens, rows in zip(
                *(column.tolist() for column in columns), self.tokens.tolist(), wire, strict=True
            )
        ]

    def reached(self, accepted: Tensor) -> Tensor:
        return self.nodes.gather(1, accepted[:, None])[:, 0]

    def prepared(self, accepted: Tensor, token: Tensor) -> Tensor:
        """Whether t is one of the draft's FAN_OUT guesses, which leave out s(a+1)."""
        guesses = self.world.candidates[self.reached(accepted)]
        following = self.tokens.gather(1, accepted.clamp(max=LENGTH - 2)[:, None])
        allowed = (guesses != following) | (accepted >= self.depth)[:, None]
        allowed &= allowed.cumsum(dim=1) <= FAN_OUT
        return ((guesses == token[:, None]) & allowed).any(dim=1)


# Fits


CASES = {
    "C = 1": Case(),
    "C = 0.5": Case(down_weight=0.5),
    "C = 0.1": Case(down_weight=0.1),
    "C = 0": Case(down_weight=0.0),
    "filters, C = 1": Case(options="filters"),
    "filters, C = 0.1": Case(options="filters", down_weight=0.1),
    "penalties, C = 0.5": Case(options="penalties", down_weight=0.5),
    "apart, C = 0.5": Case("apart", down_weight=0.5),
    "coarse wire": Case("halfway", wire=torch.float8_e5m2),
}
TEXTS = 60_000


def check(world: World, n: int) -> float:
    return texts_fit(generate(world, n, salt=11), exact(world.p), VOCAB, LENGTH)


@pytest.mark.parametrize("case", CASES)
def test_texts_follow_the_targets_distribution(case: str) -> None:
    assert check(CASES[case].world(), share(TEXTS)) > PASSES


@pytest.mark.parametrize("models", ["apart", "halfway"])
def test_at_temperature_0_every_text_is_the_targets_own(models: str) -> None:
    world = Case(models, "greedy", down_weight=0.5).world()
    assert set(generate(world, 300, salt=11)) == {int(exact(world.p).argmax())}


# Mutants


@dataclass(frozen=True)
class Mutant:
    world: World
    texts: int  # enough to reject it
    patch: dict[str, Any] = field(default_factory=dict)  # of names in ssd_engine.sampling.rejection


def mutants() -> dict[str, Mutant]:
    plain, half, tenth, coarse, apart = (
        CASES[name].world()
        for name in ("C = 1", "C = 0.5", "C = 0.1", "coarse wire", "apart, C = 0.5")
    )
    unrounded = CASES["coarse wire"].unrounded()
    return {
        "q for sigma, C = 0.5": Mutant(replace(half, shipped=plain.shipped), 2000),
        "q for sigma, C = 0.1": Mutant(replace(tenth, shipped=plain.shipped), 2000),
        "drawn from q, C = 0.1": Mutant(replace(tenth, drawn_from=plain.drawn_from), 2000),
        "confident tokens kept": Mutant(replace(plain, confident_only=0.3), 2000),
        "confident tokens kept, C = 0.1": Mutant(replace(tenth, confident_only=0.3), 5000),
        "draft and residual in a stream": Mutant(apart, 6000, {"STREAM_RESIDUAL": STREAM_DRAFT}),
        "draft and acceptance in a stream": Mutant(plain, 2000, {"STREAM_ACCEPT": STREAM_DRAFT}),
        "rounded after drawing": Mutant(replace(coarse, drawn_from=unrounded), 15_000),
        "missing rows accepted": Mutant(replace(apart, missing_is_accepted=True), 4000),
        "t from p after a rejection": Mutant(plain, 2000, {"residual": lambda p, sigma: p}),
        "n-gram taken as drawn": Mutant(replace(plain, ngram_is_drawn=True), 2000),
    }


MUTANTS = mutants()


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    for attribute, value in mutant.patch.items():
        monkeypatch.setattr(rejection, attribute, value)
    assert mutant.texts <= TEXTS // 4
    assert check(mutant.world, mutant.texts) < REJECTED


# The draft's distribution


def rows_of(n: int, **options: Any) -> list[SampleRow]:
    return [SampleRow(SamplingParams(seed=0, **options), PROMPT, [])] * n


def random_logits(n: int, vocab: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("options", [{}, OPTIONS["filters"], OPTIONS["penalties"]])
def test_without_down_weighting_sigma_is_the_drafts_own_distribution(
    options: dict[str, Any],
) -> None:
    values, rows = random_logits(5, 30), rows_of(5, **options)
    sigma = sigma_of(draft_distribution(values, rows, 3, 1.0))
    q = target_distribution(values, rows)
    assert ((sigma > 0) == (q > 0)).all()
    assert sigma.numpy() == pytest.approx(q.numpy(), rel=2.0**-7)


def test_the_likeliest_tokens_are_down_weighted_each_row_in_its_own_way() -> None:
    q = target_distribution(random_logits(4, 30), rows_of(4))
    sigma = saguaro(q, [0, 1, 4, 99], [0.5, 0.5, 0.0, 0.5])
    assert sigma.sum(dim=1).numpy() == pytest.approx(1.0)
    assert sigma[[0, 3]].numpy() == pytest.approx(q[[0, 3]].numpy())  # none, and all alike
    best = q[1].argmax()
    odds = q[1] / q[1].sum().sub(q[1, best])
    assert float(sigma[1, best] / (1 - sigma[1, best])) == pytest.approx(float(odds[best] / 2))
    assert (sigma[2] == 0).nonzero()[:, 0].tolist() == sorted(q[2].topk(4).indices.tolist())


def test_where_down_weighting_would_leave_nothing_the_distribution_stays() -> None:
    q = target_distribution(random_logits(2, 30), rows_of(2, top_k=3))
    assert torch.equal(saguaro(q, 3, 0.0), q)
    greedy = target_distribution(random_logits(2, 30), rows_of(2, temperature=0.0))
    assert torch.equal(sigma_of(to_wire(saguaro(greedy, 2, 0.0))), greedy)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
def test_sigma_does_not_depend_on_the_order_of_summation(wire: torch.dtype) -> None:
    values = random_logits(3, 50_000, scale=8.0)
    shipped = draft_distribution(values, rows_of(3), 4, 0.1, wire)
    assert shipped.dtype == wire
    for seed in range(5):
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(sigma_of(shipped[:, order]), sigma_of(shipped)[:, order])


# Rounds, one at a time

SIZE = 40


def random_p(k: int) -> Tensor:
    return target_distribution(random_logits(k + 1, SIZE), rows_of(k + 1))


def drafted(k: int, seed: int, position: int = 10) -> SampledSpeculation:
    shipped = draft_distribution(random_logits(k, SIZE, scale=1.5), rows_of(k), 2, 0.5)
    seeds = torch.full((k,), signed64(seed))
    positions = torch.arange(position, position + k)
    tokens = draw_from(sigma_of(shipped), seeds, positions, STREAM_DRAFT)
    return SampledSpeculation(seed, position, tokens.tolist(), shipped)


def own_token(p: Tensor, seed: int, position: int) -> int:
    """What a target without a speculation draws from one row."""
    return verify_rejection(p[None], [SampledSpeculation(seed, position, [])])[0][1]


def test_what_is_drawn_from_the_targets_distribution_is_accepted_whole() -> None:
    assert verify_rejection(random_p(0), []) == []
    p = sigma_of(to_wire(random_p(4)))
    for seed in range(50):
        tokens = draw_from(p[:4], torch.full((4,), seed), torch.arange(4), STREAM_DRAFT)
        speculation = SampledSpeculation(seed, 0, tokens.tolist(), p[:4])
        assert verify_rejection(p, [speculation]) == [(4, own_token(p[4], seed, 4))]


def test_an_outcome_depends_on_nothing_but_its_own_round() -> None:
    depths = [3, 0, 4, 1, 2, 4] * 5
    speculations = [drafted(k, seed=2**63 + i, position=i) for i, k in enumerate(depths)]
    speculations[2::6] = [replace(s, wire=None) for s in speculations[2::6]]
    speculations[5::6] = [replace(s, wire=s.wire[:2]) for s in speculations[5::6]]
    rows = [random_p(k) for k in depths]
    together = verify_rejection(torch.cat(rows), speculations)
    alone = [verify_rejection(p, [s])[0] for p, s in zip(rows, speculations, strict=True)]
    assert together == alone
    assert {accepted for accepted, _ in together} >= {0, 1, 2}


def spoil(wire: Tensor, token: int, how: str) -> Tensor:
    """wire [3, SIZE] with a row 2 that says nothing of its token."""
    if how == "missing":
        return wire[:2]
    spoilt = wire.clone()
    where = token if how == "excludes the token" else slice(None)
    spoilt[2, where] = dict(nan=torch.nan, infinite=torch.inf).get(how, 0.0)
    return spoilt


@pytest.mark.parametrize("how", ["missing", "excludes the token", "nan", "zero", "infinite"])
def test_a_row_that_is_missing_or_useless_cuts_the_speculation(how: str) -> None:
    p, reached = random_p(3), 0
    for seed in range(100 if FULL else 33):
        s = drafted(3, seed)
        spoilt = replace(s, wire=spoil(s.wire, s.tokens[2], how))
        ((accepted, token),) = verify_rejection(p, [spoilt])
        after = p.clone()
        after[accepted + 1 :] = torch.nan  # what comes after the end may be anything
        assert verify_rejection(after, [spoilt]) == [(accepted, token)]
        if accepted < 2:
            assert verify_rejection(p, [s]) == [(accepted, token)]
        else:
            assert (accepted, token) == (2, own_token(p[2], seed, s.position + 2))
            reached += 1
    assert reached


@pytest.mark.parametrize(("p_x", "outcome"), [(1.0, (1, 2)), (0.0, (0, 0))])
def test_a_token_that_was_not_drawn_is_right_or_wrong_for_a_greedy_target(
    p_x: float, outcome: tuple[int, int]
) -> None:
    p = torch.tensor([[1 - p_x, p_x, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert verify_rejection(p, [SampledSpeculation(5, 3, [1])]) == [outcome]


def test_an_empty_residual_gives_way_to_p() -> None:
    p = random_p(1)
    rest = residual(p, torch.stack([p[0], p[0]]))
    assert torch.equal(rest[0], p[0])
    assert (rest[1] == (p[1] - p[0]).clamp(min=0)).all()


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53, 1.0])
def test_the_ends_of_the_unit_interval_draw_what_has_weight(
    u: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "uniform_rows", lambda *_: torch.tensor([u] * 3).double())
    weights = torch.tensor([[0, 0.1, 0.7, 0], [0, 1, 0, 0], [0, 1e-9, 3, 0]], dtype=torch.float64)
    drawn = draw_from(weights, torch.zeros(3).long(), torch.zeros(3).long(), STREAM_DRAFT)
    assert drawn.tolist() == ([1, 1, 1] if u == 0.0 else [2, 1, 2])
