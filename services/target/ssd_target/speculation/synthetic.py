"""Acceptance that is made up, for load tests without a good draft. Texts are then nobody's."""

import random
from collections.abc import Sequence as Tokens

from ssd_target.scheduling.verifier import RoundOutcome


class SyntheticAcceptance:
    """Every speculated token is right with the same probability, and so is every guess of what
    the target says itself. The same request draws the same chances."""

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
