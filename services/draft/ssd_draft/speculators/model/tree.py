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
        branches: list[PreparedBranch],
        num_committed: int,
        blocks: Sequence[int],
        scratch: list[int],
        max_context: int,
    ) -> None:
        """``blocks`` of committed tokens and chain, as the cache has them; ``scratch`` slots for
        the branches' own."""
        self.branches = branches
        self._num_committed, self._blocks, self._scratch = num_committed, blocks, scratch
        longest = max(branch.accepted for branch in branches)  # chain before a branch
        self._max_depth = min(len(scratch) // len(branches), max_context - num_committed - longest)
        self._limits = [num_committed + branch.accepted - 1 for branch in branches]
        self._ranked: list[Ranked] = []  # one for each depth, where guesses are ranked

    @property
    def depth(self) -> int:
        """Tokens that each branch has after its first, the guessed outcome."""
        return len(self.branches[0].tokens)

    def has_room(self, ahead: int = 0) -> bool:
        """Whether a row more for each branch fits, when each has so many tokens more, and is of use
        to any."""
        goes_on = any(branch.ends_at is None for branch in self.branches)
        return goes_on and self.depth + ahead < self._max_depth

    def rows(self) -> TreeRows:
        """The forward that gives every branch its next token."""
        depth = self.depth
        tokens = [branch.tokens[-1] if depth else branch.token for branch in self.branches]
        return self._rows(depth, tokens)

    def rows_ahead(self, tokens: list[int]) -> TreeRows:
        """The forward after that one; ``tokens`` stand for what it will give."""
        return self._rows(self.depth + 1, tokens)

    def _rows(self, depth: int, tokens: list[int]) -> TreeRows:
        rows = len(self.branches)
        end = rows * (depth + 1)
        first = self._num_committed + depth
        return TreeRows(
            tokens=tokens,
            positions=[first + branch.accepted for branch in self.branches],
            limits=self._limits,
            slots=self._scratch[end - rows : end],
            context=self._num_committed,
            blocks=self._blocks,
            scratch=self._scratch[:end],
        )

    def slots_ahead(self) -> list[int]:
        """Where the forward after that one writes the branches' KV."""
        rows, depth = len(self.branches), self.depth + 1
        return self._scratch[rows * depth : rows * (depth + 1)]

    def index(self, branch: PreparedBranch) -> int | None:
        return next((i for i, other in enumerate(self.branches) if other is branch), None)

    def slots_of(self, index: int) -> list[int]:
        """Where a branch's KV is: that of its first token, the outcome, and all others but the
        last."""
        rows = len(self.branches)
        return self._scratch[index : rows * self.depth : rows]

    def rankings_of(self, index: int) -> list[list[int]]:
        """The guesses of each of a branch's tokens."""
        return [ranking_of(ranked, index) for ranked in self._ranked]

    def extend(self, tokens: Sequence[int], ranked: Ranked | None = None) -> None:
        for branch, token in zip(self.branches, tokens, strict=True):
            branch.extend(token)
        if ranked is not None:
            self._ranked.append(ranked)


def ranking_of(ranked: Ranked, row: int) -> list[int]:
    """The guesses of one row."""
    return [token for token in np.asarray(ranked[row]).tolist() if token >= 0]
