"""A sequence at a draft model: its KV, and the branches that are drafted for its round.

A round that is verified begins with one forward over the chain, new committed tokens included: it
gives the guesses of the token after each length. Branches are drafted one depth beyond their use,
and their guesses are kept. So when the target takes one of them, the guesses after each of its
tokens are known, and the next round begins with its first depth at once; the KV of the taken tokens
is moved to the sequence before that forward.
"""

from collections.abc import Sequence

from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftSequence, PreparedBranch
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.tree import Ranked, Tree
from ssd_engine.forward.batch import Part
from ssd_engine.kvcache.block_pool import BlockLease
from ssd_engine.kvcache.cached_path import CachedPath
from ssd_engine.sampling.rejection import Wire


class ModelSequence:
    def __init__(
        self,
        sequence: DraftSequence,
        path: CachedPath,
        scratch: BlockLease,
        block_size: int,
        max_context: int,
        look_ahead: int,
    ) -> None:
        """``look_ahead``: depths that are drafted beyond the plan, for the guesses after them."""
        self.sequence, self.path, self._scratch = sequence, path, scratch
        self._slots = [b * block_size + i for b in scratch.blocks for i in range(block_size)]
        self._block_size, self._max_context = block_size, max_context
        self._look_ahead = look_ahead
        # What the next forwards extend; None before the guesses after the chain are known.
        self.drafting: Tree | DecidedBranch | None = None
        # Guesses after each length of the chain, best first; the outcome is looked up in them.
        self.rankings: list[list[int]] = []
        # The same for the chain that is verified, if they are known before its forward.
        self._known_rankings: list[list[int]] | None = None
        self._decided: PreparedBranch | None = None  # the last one
        self._decided_slots: list[int] = []  # where its KV is, until it is moved
        # Rejection: what the tokens of each depth were drawn from, one row for each branch of the
        # tree, or one for the decided branch. [branches, vocab], or few weights of it
        self.distributions: list[Wire] = []

    def release(self) -> None:
        self.path.release()
        self._scratch.release()

    def on_round_changed(self) -> None:
        """The sequence followed an outcome or a launch; raises NoRoom before anything changes."""
        sequence = self.sequence
        self._commit()
        if sequence.decided is not None:
            self._follow_outcome(sequence.decided)
        else:
            if self._look_ahead:
                self._known_rankings = _rankings_after(sequence.speculation, self._decided)
            sequence.guesses_known = self._known_rankings is not None
            self.drafting, self.distributions = None, []

    def _commit(self) -> None:
        """The path follows the sequence's tokens; raises NoRoom before anything changes."""
        sequence, path = self.sequence, self.path
        path.reserve(sequence.num_committed)
        new = sequence.num_committed - len(path.committed)
        path.commit(sequence.output[len(sequence.output) - new :] if new else ())

    def _follow_outcome(self, branch: PreparedBranch) -> None:
        self.keep_branch(branch)
        self.rankings, self._decided = [], branch
        self.drafting = DecidedBranch(branch, self.path, self._block_size)
        no_room = len(self.path.committed) + branch.depth > self.path.max_tokens
        if no_room or branch.ends_at is not None:
            self.sequence.ready = self.sequence.complete = True

    def keep_branch(self, branch: PreparedBranch) -> None:
        """Keeps what was drafted for the decided branch, and drops the rest."""
        tree = self.drafting
        if not isinstance(tree, Tree) or (index := tree.index(branch)) is None:
            self.distributions, self._decided_slots = [], []
            return
        self.distributions = [each[index : index + 1] for each in self.distributions]
        self._decided_slots = tree.slots_of(index)
        branch.rankings = tree.rankings_of(index)

    def rows(self, limit: int, budget: int) -> int:
        """Rows of the next forward; ``limit`` and ``budget`` bound a prompt's and a new tree's."""
        if isinstance(self.drafting, Tree):
            return len(self.drafting.branches)
        logits = 1 if self.drafting is not None else 1 + len(self.sequence.speculation)
        new = len(self.path.committed) - self.path.num_known
        rows = max(logits, min(limit, new + logits - 1))
        return rows + budget if self._starts_at_once(limit) else rows

    def _starts_at_once(self, limit: int) -> bool:
        """Whether the next forward writes the rest of the chain, and is the tree's first one."""
        sequence = self.sequence
        new = len(self.path.committed) + len(sequence.speculation) - self.path.num_known
        return self.drafting is None and self._known_rankings is not None and 0 < new <= limit

    def next_parts(self, limit: int, plan: RoundPlan) -> list[Part]:
        """The sequence's share of the next forward."""
        if isinstance(self.drafting, Tree):
            return [self.drafting.rows()]
        if self.drafting is not None:
            tokens = self.drafting.branches[0].tokens
            return [*self.move_branch(), self.path.next_chunk(tokens, 1, limit)]
        chain = self.sequence.speculation
        if self._known_rankings is None or not self._starts_at_once(limit):
            return [self.path.next_chunk(chain, len(chain) + 1, limit)]
        parts = self.move_branch()
        written = self.path.next_chunk(chain, 0, limit)
        if written.tokens:
            parts.append(written)
        tree = self.start_branches(plan, self._known_rankings)
        return parts if tree is None else [*parts, tree.rows()]

    def move_branch(self) -> list[Part]:
        """Moves the decided branch's KV from the tree's slots to the sequence's."""
        branch, slots = self._decided, self._decided_slots
        self._decided_slots = []
        if branch is None or not slots:
            return []
        moved = self.path.move([branch.token, *branch.tokens[: len(slots) - 1]], slots)
        return [] if moved is None else [moved]

    def start_branches(self, plan: RoundPlan, guesses: list[list[int]]) -> Tree | None:
        """Starts a branch for each likely outcome."""
        sequence = self.sequence
        self._known_rankings = None
        self.rankings = [
            [token for token in ranking if token != wrong]
            for ranking, wrong in zip(guesses, [*sequence.speculation, None], strict=True)
        ]
        branches = [
            PreparedBranch(accepted, token)
            for accepted, width in enumerate(plan.fan_out)
            for token in self.rankings[accepted][:width]
        ]
        sequence.branches = {(branch.accepted, branch.token): branch for branch in branches}
        tree = None
        if branches:
            tree = Tree(
                branches,
                len(self.path.committed),
                self.path.blocks,
                self._slots,
                self._max_context,
            )
        self.drafting = tree
        self._judge_complete(plan)
        return tree

    def extend(self, plan: RoundPlan, tokens: Sequence[int], ranked: Ranked | None = None) -> None:
        """Adds a token to each branch that is drafted; ``ranked``: the guesses of these tokens."""
        if self.drafting is None:
            raise RuntimeError("a token for no branch")
        self.drafting.extend(tokens, ranked)
        self._judge_complete(plan)

    def _judge_complete(self, plan: RoundPlan) -> None:
        depth = 0 if self.drafting is None else self.drafting.depth
        ends = self.drafting is None or not self.drafting.has_room()
        self.sequence.ready = ends or depth >= plan.depth
        beyond = self._look_ahead if plan.depth else 0
        self.sequence.complete = ends or depth >= plan.depth + beyond


def _rankings_after(chain: Sequence[int], drafted: PreparedBranch | None) -> list[list[int]] | None:
    """The guesses after each length of the chain, if it was drafted here and one token further."""
    if drafted is None or drafted.tokens[: len(chain)] != list(chain):
        return None
    rankings = drafted.rankings[: len(chain) + 1]
    return rankings if len(rankings) == len(chain) + 1 else None
