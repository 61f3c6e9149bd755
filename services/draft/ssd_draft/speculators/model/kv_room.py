"""The KV cache of a draft model: what fits into it, and what each sequence takes of it."""

from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.base import CannotSpeculate
from ssd_engine.kvcache.block_pool import BlockLease, BlockPool
from ssd_engine.kvcache.cached_path import CachedPath, NoRoom

LOOK_AHEAD = 1  # depths beyond what is of use


class KVRoom:
    """A sequence has two leases: its tokens, and scratch slots for its branches."""

    def __init__(
        self, num_blocks: int, block_size: int, max_context: int, depth: int, budget: int
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.max_context = max_context
        self._depth = depth
        self._scratch_tokens = (depth + LOOK_AHEAD) * budget
        self.most_ahead = depth + LOOK_AHEAD + 1  # tokens of a chain, or of a decided branch

    def lease(self, sequence: DraftSequence, scope: int) -> tuple[CachedPath, BlockLease]:
        """Blocks for a sequence's tokens, and for its branches; raises NoRoom."""
        tokens, most = sequence.prompt + sequence.output, self.max_tokens(sequence)
        path = CachedPath(self.pool, tokens, self.most_ahead, most, scope, self.spare)
        return path, self.lease_branches(path)

    @property
    def spare(self) -> int:
        """Blocks that a new sequence leaves, as others want to grow, too."""
        return self.pool.num_leases // 2

    def lease_branches(self, path: CachedPath) -> BlockLease:
        """Blocks for the branches of a sequence; raises NoRoom, and releases its path."""
        scratch = self.pool.open((), self._scratch_tokens)
        if scratch is None:
            path.release()
            raise NoRoom("no room for the branches")
        scratch.grow(self._scratch_tokens)
        return scratch

    def share(self, sequence: DraftSequence) -> float:
        """The part of all blocks that a sequence takes, or would take if it were open."""
        if sequence.state is None:
            needed = min(sequence.num_committed + self.most_ahead, self.max_tokens(sequence))
            blocks = self.pool.blocks_for(needed)
        else:
            blocks = sequence.state.path.num_blocks
        return (blocks + self.pool.blocks_for(self._scratch_tokens)) / self.pool.num_blocks

    def max_tokens(self, sequence: DraftSequence) -> int:
        return min(sequence.max_tokens + self._depth, self.max_context)

    def check_context(self, sequence: DraftSequence) -> None:
        """Raises CannotSpeculate unless the sequence, its chain and one token more fit."""
        self.check(sequence)
        if sequence.num_committed + len(sequence.speculation) >= self.max_context:
            raise CannotSpeculate(f"beyond the draft's context of {self.max_context} tokens")

    def check(self, sequence: DraftSequence) -> None:
        """Raises CannotSpeculate for more than was agreed on."""
        if sequence.num_committed > sequence.max_tokens:
            raise CannotSpeculate("more tokens than the sequence was opened for")
        if len(sequence.speculation) > self._depth:
            raise CannotSpeculate(f"a speculation beyond the depth of {self._depth} tokens")
