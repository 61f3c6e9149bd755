"""The branch of a decided round as plain decode steps: its KV follows the committed tokens."""

from collections.abc import Sequence

from ssd_draft.planning.sequence import PreparedBranch
from ssd_draft.speculators.model.tree import Ranked, ranking_of
from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.cached_path import CachedPath


class DecidedBranch:
    """A forward extends it as it extends a tree, with a single row."""

    def __init__(self, branch: PreparedBranch, path: CachedPath, block_size: int) -> None:
        self.branches = [branch]
        self._tokens, self._rankings = branch.tokens, branch.rankings
        self._path, self._block_size = path, block_size
        self._start = len(path.committed)  # position of the branch's first token

    @property
    def depth(self) -> int:
        return len(self._tokens)

    def has_room(self, ahead: int = 0) -> bool:
        """Whether the next row fits, when the branch has so many tokens more, and is of use."""
        goes_on = self.branches[0].ends_at is None
        return goes_on and self._start + self.depth + ahead < self._path.max_tokens

    def rows_ahead(self, tokens: list[int]) -> Chunk:
        """The forward after the next one; ``tokens`` stand for what that will give."""
        self._path.grow(self.depth + 1)
        return Chunk(tokens, self._start + self.depth, self._path.blocks, 1)

    def slots_ahead(self) -> list[int]:
        """Where the forward after the next one writes its KV."""
        self._path.grow(self.depth + 1)
        return [self._path.slot(self._start + self.depth, self._block_size)]

    def extend(self, tokens: Sequence[int], ranked: Ranked | None = None) -> None:
        self.branches[0].extend(tokens[0])
        if ranked is not None:
            self._rankings.append(ranking_of(ranked, 0))

    def mark_written(self) -> None:
        """A forward that was launched before the last token was known writes its KV."""
        last = Chunk(self._tokens[-1:], self._start + self.depth - 1, self._path.blocks, 1)
        self._path.wrote(last)
