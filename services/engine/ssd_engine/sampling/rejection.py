"""Rejection verification: speculation that keeps the target's distribution, not its text.

The draft draws x from sigma; the target accepts x with min(1, p(x) / sigma(x)), draws its own token
t from max(p - sigma, 0) after the first rejection and from p after none. So a token is
sigma(x) min(1, p(x) / sigma(x)) + max(p(x) - sigma(x), 0) = p(x) likely (Leviathan et al., arXiv
2211.17192). What this identity needs:

(a) one sigma. What counts is ``sigma_of(wire)``, in drafting, acceptance and residual alike: it is
    rounded to its wire dtype first and drawn from afterwards.
(b) a length of the speculation that depends on time, load and s1..sj, never on s(j+1) or later:
    otherwise the tokens that are verified do not follow sigma. The caller keeps this.
(c) independence: drafting, acceptance and residual have noise streams of their own. A position
    may be drafted again after a rejection before it: what was drafted there was never looked at.
(d) no guess about what did not arrive: a missing row of sigma cuts the speculation before it. The
    row's token is forgotten and t comes from p.
(e) truth about where a token comes from: one that was not drawn is a point mass. It is accepted
    with p(x), and the residual is p without x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.sampling.noise import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    signed64,
    uniform_rows,
)
from ssd_engine.sampling.sampler import SampleRow, target_distribution

WIRE = torch.bfloat16
LIKELIEST = 64  # tokens of a row that a draft looks at: the others hardly ever win


# Drafting


def draft_distribution(
    logits: Tensor,
    rows: Sequence[SampleRow],
    fan_out: int | Sequence[int],
    down_weight: float | Sequence[float],
    wire: torch.dtype = WIRE,
) -> Tensor:
    """The draft's distribution as it is shipped [n, vocab]; sigma is what ``sigma_of`` makes of it.

    From logits [n, vocab] float32 with all sampling options: the likeliest tokens that these leave,
    Saguaro down-weighted.
    """
    q = likeliest(target_distribution(logits, rows))
    return to_wire(saguaro(q, fan_out, down_weight), wire)


def likeliest(q: Tensor) -> Tensor:
    """q [n, vocab] without all but its likeliest tokens, renormalised."""
    if q.shape[1] <= LIKELIEST:
        return q
    values, tokens = q.topk(LIKELIEST, dim=-1)
    return torch.zeros_like(q).scatter(1, tokens, values / values.sum(dim=-1, keepdim=True))


def saguaro(
    q: Tensor, fan_out: int | Sequence[int], down_weight: float | Sequence[float]
) -> Tensor:
    """q [n, vocab] with its ``fan_out`` likeliest tokens times ``down_weight``, renormalised.

    A rejection then more often ends in one of these, the tokens for which branches are prepared
    (arXiv 2603.03251). Where nothing would be left, q stays.
    """
    n, vocab = q.shape
    most = torch.as_tensor(fan_out, device=q.device).expand(n)[:, None]
    factor = torch.as_tensor(down_weight, dtype=q.dtype, device=q.device).expand(n)[:, None]
    width = min(vocab, int(most.max()) if n else 0)
    likeliest = q.topk(width, dim=-1).indices
    ranks = torch.arange(width, device=q.device)[None]
    factors = torch.where(ranks < most, factor, 1.0)
    weighted = q * torch.ones_like(q).scatter(1, likeliest, factors)
    total = weighted.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weighted / total, q)


def to_wire(q: Tensor, wire: torch.dtype = WIRE) -> Tensor:
    """Rounds to the wire dtype, which is at most float32; what is too small becomes 0.

    Every value is then a multiple of 2^-50, and float64 holds a sum of such values below 4
    exactly, in whatever order it adds them: all devices agree on sigma to the last bit.
    """
    return torch.where(q < smallest_weight(wire), 0.0, q).to(wire)


def smallest_weight(wire: torch.dtype) -> float:
    """The smallest that is shipped: with all of its digits it is a multiple of 2^-50."""
    return 2.0**-50 / torch.finfo(wire).eps


def sigma_of(wire: Tensor) -> Tensor:
    """The distribution that a shipped one stands for [n, vocab] float64."""
    values = wire.to(torch.float64)
    return values / values.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class FewWeights:
    """Distributions as they are shipped: a few tokens [n, m] and their weights in float32. All
    other tokens have no weight; a token of -1 stands for no token."""

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    vocab_size: int
    device: torch.device  # where they are wanted

    def __getitem__(self, rows: slice) -> "FewWeights":
        return FewWeights(self.tokens[rows], self.weights[rows], self.vocab_size, self.device)

    def wire(self, device: torch.device | None = None) -> Tensor:
        """All weights [n, vocab_size], on ``device`` or where they are wanted."""
        device = device or self.device
        there = self.tokens >= 0
        tokens = torch.from_numpy(np.where(there, self.tokens, 0).astype(np.int64))
        weights = torch.from_numpy(np.where(there, self.weights, np.float32(0.0)))
        rows = torch.zeros(len(tokens), self.vocab_size, dtype=WIRE, device=device)
        # Added: what stands for no token has no weight.
        return rows.scatter_add_(1, tokens.to(device), weights.to(device, WIRE))


Wire = Tensor | FewWeights  # the distributions of several rows


def whole_wire(wires: Sequence[Wire], device: torch.device | None = None) -> Tensor:
    """All rows, one after the other [rows, vocab]; few weights become many on ``device``."""
    few = [wire for wire in wires if isinstance(wire, FewWeights)]
    if len(few) < len(wires):
        return torch.cat([w.wire(device) if isinstance(w, FewWeights) else w for w in wires])
    tokens, weights = (
        np.concatenate(each) for each in zip(*((w.tokens, w.weights) for w in few), strict=True)
    )
    return replace(few[0], tokens=tokens, weights=weights).wire(device)


def draw_from(weights: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """A token [n] for each row of weights [n, vocab], in proportion to them.

    ``seeds`` and ``positions`` are int64 [n]. One number decides on a token: there is nothing here
    to couple, and noise for every token would cost more than the model that drafts.
    """
    reached = weights.cumsum(dim=-1)
    total = reached[:, -1:]
    at = uniform_rows(seeds, positions, stream)[:, None] * total
    # A token of weight 0 reaches no further than the one before it: it is never the first beyond.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(reached, at, right=True)[:, 0]
    return tokens.clamp(max=weights.shape[1] - 1)  # rows of NaN


# Verification

ACCEPTED, REJECTED, CUT = range(3)


@dataclass(frozen=True, slots=True)
class SampledSpeculation:
    """What a round verifies, and where its tokens come from."""

    seed: int
    position: int  # absolute, of the first token; of t when there is none
    tokens: Sequence[int]
    # [m, vocab] as shipped: token i was drawn from row i, rows from m on are missing.
    # None: the tokens were not drawn, they are point masses.
    wire: Tensor | None = None

    @property
    def known(self) -> int:
        """Tokens before the first missing row."""
        k = len(self.tokens)
        return k if self.wire is None else min(k, self.wire.shape[0])


def verify_rejection(
    p: Tensor, speculations: Sequence[SampledSpeculation]
) -> list[tuple[int, int]]:
    """(accepted, token) of each round.

    p is [sum of (k + 1), vocab] float64 after all sampling options: for each round, one after
    the other, the rows of its k tokens and the row after them. Rows after a rejection or a cut may
    hold anything.
    """
    if not speculations:
        return []
    p_begin = _begins([len(s.tokens) + 1 for s in speculations])
    sigma_begin = _begins([s.known for s in speculations])
    sigma = _sigma_rows(speculations, p)
    verdicts = _verdicts(p, sigma, speculations, p_begin)
    accepted: list[int] = []
    rejected: dict[int, int] = {}  # round -> row of sigma
    for i, s in enumerate(speculations):
        judged = [*verdicts[sigma_begin[i] : sigma_begin[i] + s.known], CUT]
        a = next(a for a, verdict in enumerate(judged) if verdict != ACCEPTED)
        accepted.append(a)
        if judged[a] == REJECTED:
            rejected[i] = sigma_begin[i] + a
    last = p[[begin + a for begin, a in zip(p_begin, accepted, strict=True)]]  # [rounds, vocab]
    if rejected:
        rounds, rows = list(rejected), list(rejected.values())
        last[rounds] = residual(last[rounds], sigma[rows])
    seeds = torch.tensor([signed64(s.seed) for s in speculations], device=p.device)
    positions = [s.position + a for s, a in zip(speculations, accepted, strict=True)]
    tokens = draw_from(last, seeds, torch.tensor(positions, device=p.device), STREAM_RESIDUAL)
    return list(zip(accepted, tokens.tolist(), strict=True))


def residual(p: Tensor, sigma: Tensor) -> Tensor:
    """What t is drawn from after a rejection, up to a factor [n, vocab]; p where it is empty."""
    rest = (p - sigma).clamp(min=0.0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)


def _begins(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _sigma_rows(speculations: Sequence[SampledSpeculation], p: Tensor) -> Tensor:
    """sigma of every known token [sum of known, vocab] float64."""
    begins = _begins([s.known for s in speculations])
    shipped: list[Tensor] = []
    drawn: list[int] = []
    points: list[tuple[int, int]] = []
    for begin, s in zip(begins, speculations, strict=True):
        if s.wire is None:
            points += [(begin + i, token) for i, token in enumerate(s.tokens)]
        elif s.known:
            shipped.append(s.wire[: s.known])
            drawn += range(begin, begin + s.known)
    sigma = p.new_zeros(len(drawn) + len(points), p.shape[1])
    if drawn:
        sigma[drawn] = sigma_of(torch.cat(shipped))
    if points:
        rows, tokens = zip(*points, strict=True)
        sigma[list(rows), list(tokens)] = 1.0
    return sigma


def _verdicts(
    p: Tensor, sigma: Tensor, speculations: Sequence[SampledSpeculation], p_begin: Sequence[int]
) -> list[int]:
    """The verdict on every known token, whatever became of those before it."""
    known = [
        (signed64(s.seed), s.position + i, s.tokens[i], begin + i)
        for begin, s in zip(p_begin, speculations, strict=True)
        for i in range(s.known)
    ]
    if not known:
        return []
    seed, position, x, row = torch.tensor(known, device=p.device).T
    p_x, sigma_x = p[row, x], sigma.gather(1, x[:, None])[:, 0]
    u = uniform_rows(seed, position, STREAM_ACCEPT)
    verdict = torch.where(u * sigma_x < p_x, ACCEPTED, REJECTED)
    # What sigma excludes was not drawn from it, and NaN is no sigma: as good as missing.
    return torch.where(sigma_x > 0, verdict, CUT).tolist()
