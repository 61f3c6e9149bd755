"""Look-up in prompt and output: no model, no device, instant."""

from collections.abc import Sequence

from ssd_draft.plan import RoundPlan
from ssd_draft.sequence import DraftSequence, Offer, Phase
from ssd_draft.speculators.base import Need
from ssd_engine.ngram import NgramIndex
from ssd_engine.tensor_plane import MakeRows


class _State:
    def __init__(self, sequence: DraftSequence) -> None:
        self.index = NgramIndex()
        self.num_indexed = 0
        self.follow(sequence)

    def follow(self, sequence: DraftSequence) -> None:
        committed = sequence.prompt + sequence.output
        self.index.extend(committed[self.num_indexed :])
        self.num_indexed = len(committed)


class NgramSpeculator:
    needs: frozenset[Need] = frozenset()
    is_typical = True

    def new_scope(self) -> int:
        return 0  # nothing outlives its sequence

    def open(self, sequence: DraftSequence, scope: int) -> None:
        sequence.state = _State(sequence)

    def memory_share(self, sequence: DraftSequence) -> float:
        return 0.0  # next to nothing

    def moved(self, sequence: DraftSequence) -> None:
        sequence.state.follow(sequence)

    def rows(self, sequence: DraftSequence, limit: int) -> int:
        return int(not sequence.complete)

    def step(
        self, sequences: Sequence[DraftSequence], limit: int, plans: Sequence[RoundPlan]
    ) -> int:
        for sequence, plan in zip(sequences, plans, strict=True):
            if sequence.phase is Phase.VERIFYING:
                self._offer_outcomes(sequence, plan)
            else:
                self._continue(sequence, plan)
            sequence.complete = True
        return len(sequences)

    def rank(self, sequence: DraftSequence, accepted: int, token: int) -> tuple[int | None, int]:
        return None, 0

    def drawn_from(self, sequence: DraftSequence, count: int) -> MakeRows | None:
        return None  # nothing is drawn here

    def close(self, sequence: DraftSequence) -> None:
        sequence.state = None

    def check_integrity(self, num_sequences: int) -> None:
        pass

    def _offer_outcomes(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        index: NgramIndex = sequence.state.index
        for accepted, width in enumerate(plan.fan_out):
            chain = sequence.speculation[:accepted]
            wrong = sequence.speculation[accepted : accepted + 1]
            guesses = index.candidates(width + 1, chain) if width else []
            for token in [guess for guess in guesses if guess not in wrong][:width]:
                tokens = index.propose(plan.depth, (*chain, token))
                sequence.offers[accepted, token] = Offer(accepted, token, tokens)

    def _continue(self, sequence: DraftSequence, plan: RoundPlan) -> None:
        for offer in sequence.offers.values():
            if not offer.tokens:
                offer.tokens += sequence.state.index.propose(plan.depth)
