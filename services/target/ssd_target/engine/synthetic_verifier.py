"""Made-up acceptance, for load tests without a good draft. The texts are then no model's."""

import random
from collections.abc import Sequence

from ssd_engine.forward.result import ForwardResult
from ssd_target.scheduling.verifier import (
    DraftDistributions,
    NothingDrawn,
    RoundOutcome,
    verify,
)
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator


class SyntheticVerifier:
    """Takes every speculated token for right with the same probability, and so every guess of the
    target's own token. The same request gets the same outcomes."""

    def __init__(self, rate: float, speculator: SpeculationCoordinator) -> None:
        self._rate, self._speculator = rate, speculator

    def __call__(
        self,
        works: Sequence[Work],
        scored: ForwardResult,
        distributions: Sequence[DraftDistributions | None],
    ) -> list[RoundOutcome | NothingDrawn]:
        return list(map(self._make_up, works, verify(works, scored, distributions)))

    def _make_up(
        self, work: Work, outcome: RoundOutcome | NothingDrawn
    ) -> RoundOutcome | NothingDrawn:
        sequence, tokens = work.sequence, work.speculation.tokens
        if isinstance(outcome, NothingDrawn) or work.is_over:
            return outcome
        chances = random.Random(f"{(sequence.sampling.seed, sequence.num_committed)}")
        accepted = 0
        while accepted < len(tokens) and chances.random() < self._rate:
            accepted += 1
        token = outcome.tokens[-1]
        foreseen = self._speculator.foreseen(sequence, accepted)
        if chances.random() < self._rate and foreseen:
            token = foreseen[0]
        return RoundOutcome(range(accepted), [*tokens[:accepted], token], None)
