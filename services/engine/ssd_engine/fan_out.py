"""How many outcomes to prepare for, how deep to speculate, and the rates that decide it.

The laws are those of arXiv 2603.03251. Plain arithmetic, cheap enough for every round.
"""

import math
from collections.abc import Callable

MARGIN = 1e-3  # alpha is kept this far from 0 and from 1, where the law degenerates


def fan_out(depth: int, alpha: float, r: float, budget: int) -> list[int]:
    """Theorem 12: candidates of t for each outcome a = 0..depth; their sum is the budget.

    F_j = F_0 alpha^(j / (1+r)) for j < K, F_K = F_0 alpha^(K / (1+r)) (1-alpha)^(-1 / (1+r)):
    where an outcome is likelier, and the all-accepted one is by 1 / (1-alpha), more is prepared.
    There is no floor of 1: an outcome for which the theorem gives less than the last candidate's
    share happens so rarely that this candidate serves better elsewhere.
    """
    alpha = min(max(alpha, MARGIN), 1.0 - MARGIN)
    exponent = 1.0 / (1.0 + max(r, 0.0))
    weights = [alpha ** (j * exponent) for j in range(depth + 1)]
    weights[depth] *= (1.0 - alpha) ** -exponent
    return _largest_remainder(weights, budget)


def uniform(depth: int, budget: int) -> list[int]:
    """The same for every outcome; what does not divide goes to the first ones."""
    return _largest_remainder([1.0] * (depth + 1), budget)


def _largest_remainder(weights: list[float], budget: int) -> list[int]:
    """Whole numbers in proportion to the weights, of sum budget; ties go to the first ones."""
    budget = max(budget, 0)
    total = sum(weights)
    shares = [budget * weight / total for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: counts[j] - shares[j])
    for j in by_remainder[: budget - sum(counts)]:
        counts[j] += 1
    return counts


class AcceptanceRate:
    """alpha: the share of judged tokens that were accepted, older ones counting for less.

    The prior weighs as much as ``prior_tokens`` judged tokens and never decays.
    """

    def __init__(
        self, prior: float = 0.7, prior_tokens: float = 8.0, half_life: float = 256.0
    ) -> None:
        self._prior = prior
        self._prior_tokens = prior_tokens
        self._decay = 0.5 ** (1.0 / half_life)  # per judged token
        self._accepted = 0.0
        self._judged = 0.0

    def observe(self, accepted: int, depth: int) -> None:
        """A round accepted the first tokens of a speculation; what follows a wrong one is unjudged.

        ``depth`` counts the tokens that could be judged: in rejection, those before a cut.
        """
        judged = min(accepted + 1, depth)
        keep = self._decay**judged
        self._accepted = self._accepted * keep + accepted
        self._judged = self._judged * keep + judged

    @property
    def value(self) -> float:
        accepted = self._accepted + self._prior * self._prior_tokens
        return accepted / (self._judged + self._prior_tokens)


class MissExponent:
    """r of miss(F) = F^-r: how fast more candidates of t lower the chance of a miss.

    Decayed counts of P(rank >= F) at F = 2, 4, 8, ...; r is the slope of -log P over log F, a line
    through the origin (the law says miss(1) = 1, so F = 1 bears no weight), by least squares
    weighted with the number of misses, which is about the inverse variance of log P. The prior
    stands for ``prior_ranks`` ranks that follow the law with r = prior, and never decays.
    """

    LOWEST, HIGHEST = 0.05, 4.0

    def __init__(
        self,
        prior: float = 1.0,
        prior_ranks: float = 8.0,
        half_life: float = 256.0,
        max_fan_out: int = 256,
    ) -> None:
        self._sizes = [2**i for i in range(1, max(max_fan_out, 2).bit_length())]
        self._decay = 0.5 ** (1.0 / half_life)  # per observed rank
        self._prior_missed = [prior_ranks * size**-prior for size in self._sizes]
        self._prior_ranks = prior_ranks
        self._missed = [0.0] * len(self._sizes)
        self._seen = [0.0] * len(self._sizes)

    def observe(self, rank: int | None, ranked: int) -> None:
        """The token's rank, from 0, among ``ranked`` candidates; None: it is none of them.

        Nothing is learnt about more candidates than were ranked, whether it is one of them or not:
        to count only those that were found would bias the estimate.
        """
        for i, size in enumerate(self._sizes):
            if size > ranked:
                return
            missed = rank is None or rank >= size
            self._missed[i] = self._missed[i] * self._decay + missed
            self._seen[i] = self._seen[i] * self._decay + 1.0

    @property
    def value(self) -> float:
        above = below = 0.0
        for i, size in enumerate(self._sizes):
            missed = self._missed[i] + self._prior_missed[i]
            rate = missed / (self._seen[i] + self._prior_ranks)
            x = math.log(size)
            above -= missed * x * math.log(rate)
            below += missed * x * x
        return min(max(above / below, self.LOWEST), self.HIGHEST)


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens per round, 1 + alpha + .. + alpha^depth = (1 - alpha^(depth+1)) / (1 - alpha)."""
    return math.fsum(alpha**i for i in range(depth + 1))


def choose_depth(alpha: float, verify_seconds: Callable[[int], float], max_depth: int) -> int:
    """The depth, 0 included, of most expected tokens per second; of equal ones the least."""
    return max(range(max_depth + 1), key=lambda k: expected_tokens(alpha, k) / verify_seconds(k))


def theorem7(p: float, e_hit: float, e_miss: float, t_v: float, t_p: float, t_b: float) -> float:
    """Tokens per second at hit rate p with e_hit or e_miss tokens per round.

    t_v: seconds of one verification; t_p, the tree, and t_b, the backup, in units of t_v.
    """
    tokens = p * e_hit + (1.0 - p) * e_miss
    return tokens / (t_v * (p * max(1.0, t_p) + (1.0 - p) * (1.0 + t_b)))
