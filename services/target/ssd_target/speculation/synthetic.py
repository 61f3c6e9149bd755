"""Made-up acceptance, for load tests without a good draft. The texts are then no model's."""

import random
from collections.abc import Sequence as Tokens

from ssd_target.scheduling.verifier import RoundOutcome


class SyntheticAcceptance:
    """Takes every speculated token for right with the same probability, and so every guess of the
    target's own token. The same request gets the same outcomes."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(
        self,
        outcome: RoundOutcome,
        speculated: Tokens[int],
        foreseen: Tokens[Tokens[int]],
        key: tuple[int, int],
    ) -> RoundOutcome:
        """``foreseen``: for each number of accepted tokens, what an endpoint expects then. ``key``:
        seed and position."""
        chances = random.Random(f"{key}")
        accepted = 0
        while accepted < len(speculated) and chances.random() < self.rate:
            accepted += 1
        token = outcome.tokens[-1]
        if chances.random() < self.rate and foreseen[accepted]:
            token = foreseen[accepted][0]
        return RoundOutcome(accepted, [*speculated[:accepted], token], None)
