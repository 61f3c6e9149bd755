"""How many outcomes to prepare for, how deep to speculate, and the rates that decide it.

The laws are those of arXiv 2603.03251. Plain arithmetic, cheap enough for every round.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

MARGIN = 1e-3  # alpha is kept this far from 0 and from 1, where the law degenerates
FULL = -1.0  # the gain where no candidate may be added


@dataclass(frozen=True, slots=True)
class MissLaw:
    """How often the token t is not among F candidates: first * F^-r, or always where F is 0."""

    first: float  # with one candidate
    r: float

    def miss(self, candidates: int) -> float:
        return float(self.first * candidates**-self.r) if candidates else 1.0


def fan_out(
    depth: int,
    alpha: float,
    rejected: MissLaw,
    full: MissLaw,
    budget: int,
    most: int | None = None,
) -> list[int]:
    """Candidates of t for each outcome a = 0..depth, ``most`` for each; their sum is the budget.

    One after the other goes where it prevents the most misses: no other split prevents more. With
    one law for all outcomes and many candidates this is theorem 12, F_j = F_0 alpha^(j / (1+r)) for
    j < K and F_K = F_0 alpha^(K / (1+r)) (1-alpha)^(-1 / (1+r)). But t is easier to guess after a
    full acceptance than after a rejection, where the best guess was the wrong token; and the first
    candidate, worth nothing by the theorem's law miss(F) = F^-r, is worth most. There is no floor
    of 1: the last candidate may serve better than at an outcome that hardly ever happens.
    """
    alpha = min(max(alpha, MARGIN), 1.0 - MARGIN)
    chances = [alpha**j * (1.0 - alpha) for j in range(depth)] + [alpha**depth]
    laws = [rejected] * depth + [full]
    counts = [0] * (depth + 1)
    gains = [chance * (1.0 - law.first) for chance, law in zip(chances, laws, strict=True)]
    for _ in range(budget):
        j = max(range(depth + 1), key=gains.__getitem__)
        if counts[j] == most:
            break  # what is full has no gain: all of them are
        counts[j] += 1
        more = chances[j] * (laws[j].miss(counts[j]) - laws[j].miss(counts[j] + 1))
        gains[j] = FULL if counts[j] == most else more
    return counts


def uniform(depth: int, budget: int) -> list[int]:
    """The same for every outcome; what does not divide goes to the first ones."""
    each, rest = divmod(max(budget, 0), depth + 1)
    return [each + (j < rest) for j in range(depth + 1)]


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


class MissRate:
    """A measured MissLaw.

    Decayed counts of P(rank >= F) at F = 1, 2, 4, ...; the law is a line of log P over log F, by
    least squares weighted with the number of misses, which is about the inverse variance of log P.
    The prior stands for ``prior_ranks`` ranks that follow its law, and never decays.
    """

    LOWEST, HIGHEST = 0.05, 4.0  # r
    MOST = 0.95  # the highest ``first``: one candidate is always worth something

    def __init__(
        self,
        prior: MissLaw,
        prior_ranks: float = 8.0,
        half_life: float = 256.0,
        max_fan_out: int = 256,
    ) -> None:
        self._sizes = [2**i for i in range(max(max_fan_out, 2).bit_length())]
        self._decay = 0.5 ** (1.0 / half_life)  # per observed rank
        self._prior_missed = [prior_ranks * prior.miss(size) for size in self._sizes]
        self._prior_ranks = prior_ranks
        self._missed = [0.0] * len(self._sizes)
        self._seen = [0.0] * len(self._sizes)

    def observe(self, rank: int | None, ranked: int) -> None:
        """The token's rank, from 0, among ``ranked`` candidates; None where it is none of them.

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
    def law(self) -> MissLaw:
        weight = x_sum = y_sum = xx_sum = xy_sum = 0.0
        for i, size in enumerate(self._sizes):
            missed = self._missed[i] + self._prior_missed[i]
            x, y = math.log(size), math.log(missed / (self._seen[i] + self._prior_ranks))
            weight += missed
            x_sum, y_sum = x_sum + missed * x, y_sum + missed * y
            xx_sum, xy_sum = xx_sum + missed * x * x, xy_sum + missed * x * y
        slope = (weight * xy_sum - x_sum * y_sum) / (weight * xx_sum - x_sum * x_sum)
        r = min(max(-slope, self.LOWEST), self.HIGHEST)
        return MissLaw(min(math.exp((y_sum + r * x_sum) / weight), self.MOST), r)


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens per round, 1 + alpha + .. + alpha^depth = (1 - alpha^(depth+1)) / (1 - alpha)."""
    return math.fsum(alpha**i for i in range(depth + 1))


def choose_depth(alpha: float, verify_seconds: Callable[[int], float], max_depth: int) -> int:
    """The depth, 0 included, of most expected tokens per second; of equal ones the least."""
    return max(range(max_depth + 1), key=lambda k: expected_tokens(alpha, k) / verify_seconds(k))
