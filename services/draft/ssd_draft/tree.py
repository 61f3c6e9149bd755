"""The branches of one round as rows of a forward, one depth at a time. No torch here.

In the cache lie the committed tokens and, after them, the chain that the target verifies. A branch
(a, t) sees the committed tokens, the first a tokens of the chain, and its own tokens, which lie in
scratch slots, depth after depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssd_draft.sequence import Offer
from ssd_engine.batch import TreeRows


@dataclass(slots=True)
class Tree:
    offers: list[Offer]
    num_committed: int
    blocks: Sequence[int]  # of committed tokens and chain
    chain: list[int]  # slots of the verified chain
    scratch: list[int]  # slots for the branches' own tokens

    @property
    def depth(self) -> int:
        """Tokens that each branch has after its first, the guessed outcome."""
        return len(self.offers[0].tokens)

    @property
    def has_room(self) -> bool:
        return (self.depth + 1) * len(self.offers) <= len(self.scratch)

    def rows(self) -> TreeRows:
        """The forward that gives every branch its next token."""
        rows, depth = len(self.offers), self.depth
        end = rows * (depth + 1)
        accepted = np.array([offer.accepted for offer in self.offers])
        visible = np.zeros((rows, len(self.chain) + end), dtype=bool)
        visible[:, : len(self.chain)] = np.arange(len(self.chain)) < accepted[:, None]
        visible[:, len(self.chain) :] = np.tile(np.eye(rows, dtype=bool), depth + 1)
        return TreeRows(
            tokens=[offer.tokens[-1] if depth else offer.token for offer in self.offers],
            positions=(self.num_committed + accepted + depth).tolist(),
            slots=self.scratch[end - rows : end],
            context=self.num_committed,
            blocks=self.blocks,
            tail=self.chain + self.scratch[:end],
            visible=visible,
        )

    def extend(self, tokens: Sequence[int]) -> None:
        for offer, token in zip(self.offers, tokens, strict=True):
            offer.tokens.append(token)
