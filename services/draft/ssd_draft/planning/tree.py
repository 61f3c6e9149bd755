"""The branches of one round as rows of a forward, one depth at a time. No torch here.

In the cache lie the committed tokens and, after them, the chain that the target verifies. A branch
(a, t) sees the committed tokens, the first a tokens of the chain, and its own tokens, which lie in
scratch slots, depth after depth.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssd_draft.planning.sequence import PreparedBranch
from ssd_engine.forward.batch import TreeRows

Ranked = Sequence[Sequence[int]] | NDArray[np.int32]  # guesses of each row, best first; -1 is none


class Tree:
    def __init__(
        self,
        offers: list[PreparedBranch],
        num_committed: int,
        blocks: Sequence[int],
        scratch: list[int],
    ) -> None:
        """``blocks`` of committed tokens and chain; ``scratch`` slots for the branches' own."""
        self.offers = offers
        self.longest = max(offer.accepted for offer in offers)  # chain before a branch
        self._num_committed = num_committed
        self._blocks = blocks
        self._scratch = scratch
        self._max_depth = len(scratch) // len(offers)
        self._limits = [num_committed + offer.accepted - 1 for offer in offers]
        self._ranked: list[Ranked] = []  # one for each depth, where guesses are ranked

    @property
    def depth(self) -> int:
        """Tokens that each branch has after its first, the guessed outcome."""
        return len(self.offers[0].tokens)

    def has_room(self, ahead: int = 0) -> bool:
        return self.depth + ahead < self._max_depth

    def rows(self) -> TreeRows:
        """The forward that gives every branch its next token."""
        depth = self.depth
        tokens = [offer.tokens[-1] if depth else offer.token for offer in self.offers]
        return self._rows(depth, tokens)

    def rows_ahead(self, tokens: list[int]) -> TreeRows:
        """The forward after that one; ``tokens`` stand for what it will give."""
        return self._rows(self.depth + 1, tokens)

    def _rows(self, depth: int, tokens: list[int]) -> TreeRows:
        rows = len(self.offers)
        end = rows * (depth + 1)
        first = self._num_committed + depth
        return TreeRows(
            tokens=tokens,
            positions=[first + offer.accepted for offer in self.offers],
            limits=self._limits,
            slots=self._scratch[end - rows : end],
            context=self._num_committed,
            blocks=self._blocks,
            scratch=self._scratch[:end],
        )

    def slots_ahead(self) -> list[int]:
        """Where the forward after that one writes the branches' KV."""
        rows, depth = len(self.offers), self.depth + 1
        return self._scratch[rows * depth : rows * (depth + 1)]

    def index(self, offer: PreparedBranch) -> int | None:
        return next((i for i, other in enumerate(self.offers) if other is offer), None)

    def slots_of(self, at: int) -> list[int]:
        """Where a branch's KV is: of its first token, the outcome, and all others but the last."""
        rows = len(self.offers)
        return self._scratch[at : rows * self.depth : rows]

    def rankings_of(self, at: int) -> list[list[int]]:
        """The guesses of each of a branch's tokens."""
        lines = (np.asarray(ranked[at]).tolist() for ranked in self._ranked)
        return [[token for token in line if token >= 0] for line in lines]

    def extend(self, tokens: Sequence[int], ranked: Ranked | None = None) -> None:
        for offer, token in zip(self.offers, tokens, strict=True):
            offer.tokens.append(token)
        if ranked is not None:
            self._ranked.append(ranked)
