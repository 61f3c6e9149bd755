"""A sequence at a head: the text that the head reads, what the target has told, and its branches.

Row j of the text reads token j + 1 and the features of token j. So the text of a head is the
sequence's without its first token, or, where the target tells nothing of the beginning, without all
up to the first token that it tells of: the *base*. In all else it is a draft model's text.

Every round begins with a forward over what the target has told since and the chain that it
verifies. Told rows are computed with their features. The chain goes on from the states that were
left when it was drafted, or, where there is time, token by token from the new ones. So do committed
rows that were not told, until they are. A row whose predecessor was not computed yet waits for the
next forward.
"""

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.head.feature_window import FeatureWindow
from ssd_draft.speculators.head.head_steps import ToldChunk
from ssd_draft.speculators.head.told_path import ToldPath
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_draft.speculators.model.tree import Tree
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.kvcache.block_pool import BlockLease, BlockPool
from ssd_engine.kvcache.cached_path import NoRoom

# Rows one after the other that the head computes from its own states; beyond them what it drafts
# is worth nothing.
MOST_UNTOLD = 32
MOST_MENDED = 64  # rows that are computed again for features that came late


class HeadSequence(ModelSequence):
    path: ToldPath

    def __init__(
        self,
        sequence: DraftSequence,
        pool: BlockPool,
        path: ToldPath,
        scratch: BlockLease,
        base: int,
        max_context: int,
        window: int,
    ) -> None:
        """``path`` of the text from ``base`` on; ``window``: positions whose features are kept."""
        super().__init__(sequence, path, scratch, pool.block_size, max_context, look_ahead=0)
        self._pool, self.base = pool, base
        self._features = FeatureWindow(min(window, max(1, sequence.max_tokens)))
        self._window = min(window, max_context // 2)  # what is left of a text that grew too long

    # What it is told

    def features_from(self) -> int:
        """The first position that the target has not told of, nor the prefix cache."""
        position = self.base + self.path.num_final
        while position in self._features:
            position += 1
        return position

    def features_until(self, start: int) -> int:
        """How far rows from ``start`` on can be kept beside those that were not read yet."""
        read = max(self.path.num_final, self.path.num_known - MOST_MENDED)
        told = range(self.base + read, self._features.end)
        unread = next((at for at in told if self._tells_more(at - self.base)), start)
        return min(start, unread) + self._features.window

    def take_features(self, start: int, rows: Tensor) -> None:
        """Positions may be those of the round that is verified, whose outcome is not known yet."""
        sequence = self.sequence
        most = sequence.num_committed + len(sequence.speculation) + self.path.ahead
        if 0 <= start < most:
            self._features.take(start, rows[: most - start])
        if isinstance(self.drafting, Tree):
            if self._is_worth_another_start(self.drafting):
                self._forget_tree()
        else:
            try:
                self._commit()
            except NoRoom:
                return  # the next change of rounds asks for it again
        self.judge_waiting()

    def _is_worth_another_start(self, tree: Tree) -> bool:
        """Whether the tree has begun a little before the last row was told: nobody has seen it."""
        if not self._tells_more(len(self.path.committed) - 1):
            return False
        early = 2 * tree.depth <= self.sequence.depth
        return early and not any(branch.num_pushed for branch in tree.branches)

    def _forget_tree(self) -> None:
        sequence = self.sequence
        self.drafting, self.rankings, self.distributions = None, [], []
        sequence.branches = {}
        sequence.ready = sequence.complete = False

    def on_round_changed(self) -> None:
        self.sequence.waits = False
        super().on_round_changed()
        self.judge_waiting()

    def judge_waiting(self) -> None:
        """A sequence with nothing to compute before more is told is left alone."""
        sequence = self.sequence
        if isinstance(self.drafting, Tree) or (sequence.complete and not sequence.waits):
            return
        begin, end, _ = self._next_rows(limit=1)
        sequence.waits = sequence.complete = begin == end

    # The text

    def _commit(self) -> None:
        if (base := self._better_base()) is not None:
            self._begin_again(base)
        path, sequence = self.path, self.sequence
        length = max(0, sequence.num_committed - 1 - self.base)
        path.reserve(length)
        if new := length - len(path.committed):
            path.commit(_last_tokens(sequence, new))
            if isinstance(self.drafting, DecidedBranch):
                branch = self.drafting.branches[0]
                self.drafting = DecidedBranch(branch, path, self._block_size)

    def _better_base(self) -> int | None:
        """Another base, where the text has outgrown the head's context, or where more was left out
        by the target than the head can go on without."""
        length = self.sequence.num_committed - 1 - self.base
        if length + self.path.ahead > self._max_context:
            earliest = self.base + length - self._window
            told = self._features.first(earliest, self._features.end)
            return earliest if told is None else told
        known = self.path.num_known
        told = self._features.first(self.base + known, self.base + length)
        if told is None or (known and told - self.base - self.path.told_end <= MOST_UNTOLD):
            return None
        return told if told > self.base + known else None

    def _begin_again(self, base: int) -> None:
        """The path begins at another base; it is empty, and so it fits where the old one did."""
        ahead, most = self.path.ahead, self.path.max_tokens
        self.path.release()
        self.path = ToldPath(self._pool, [], ahead, most, root=None)
        self.base, self._decided_slots = base, []

    # Forwards

    def rows(self, limit: int, budget: int) -> int:
        if isinstance(self.drafting, Tree):
            return len(self.drafting.branches)
        begin, end, _ = self._next_rows(limit)
        return end - begin

    def next_parts(self, limit: int, plan: RoundPlan) -> list[Part]:
        if isinstance(self.drafting, Tree):
            return [self.drafting.rows()]
        parts = self.move_branch()
        begin, end, num_logits = self._next_rows(limit, plan.patient)
        if begin == end:
            return parts
        told = [self._was_told(row) for row in range(begin, end)]
        first = end - num_logits  # that has logits
        for is_told, run in groupby(range(begin, end), key=lambda row: told[row - begin]):
            rows = [*run]
            chunk = self._piece(rows, len([row for row in rows if row >= first]))
            parts.append(self._with_features(chunk) if is_told else chunk)
        self.path.computing(begin, told)
        return parts

    def _piece(self, rows: Sequence[int], num_logits: int) -> Chunk:
        return self.path.piece(self._guesses, rows[0], rows[-1] + 1, num_logits)

    def _with_features(self, chunk: Chunk) -> ToldChunk:
        told = self._features.stacked([self.base + row for row in chunk.positions])
        return ToldChunk(chunk.tokens, chunk.start, chunk.blocks, chunk.num_logits, features=told)

    @property
    def _guesses(self) -> Sequence[int]:
        """What follows the committed tokens: the chain that is verified, or the decided branch."""
        if self.drafting is not None:
            return self.drafting.branches[0].tokens
        return self.sequence.speculation

    def _was_told(self, row: int) -> bool:
        return row < len(self.path.committed) and self.base + row in self._features

    def _next_rows(self, limit: int, patient: bool = False) -> tuple[int, int, int]:
        """The rows of the next forward, from one up to another, and how many of them, the last
        ones, have logits. What is computed already is computed again from the first row on that
        was told since; with patience the chain after it goes on from the new states then."""
        guesses, num_logits = self._guesses, 1
        if self.drafting is None:
            num_logits += len(guesses)
        total = len(self.path.committed) + len(guesses)
        known = total - self.path.num_missing(guesses)
        goal = self._goal(total)
        begin = end = min(self._first_to_read(known), goal)
        while end < goal and end - begin < max(limit, num_logits):
            if not self._was_told(end) and not 0 < end <= known:
                break
            end += 1
        length = len(self.path.committed)
        if patient and begin < length < end and self._tells_more(length - 1):
            end = length
        if end < total:
            return begin, end, 0
        begin = min(begin, total - num_logits)
        return (begin, end, num_logits) if begin >= 0 else (0, 0, 0)

    def _goal(self, total: int) -> int:
        """How far the path of so many rows is to be computed. A sequence that was just opened is
        told all of its text first: no branches are worth more than those."""
        length, sequence = len(self.path.committed), self.sequence
        last = self._features.last(self.base + length)
        told = max(self.path.told_end, 0 if last is None else last + 1 - self.base)
        alone = 0 if sequence.round == sequence.opened_in_round else MOST_UNTOLD
        return total if told and length - told <= alone else told

    def _first_to_read(self, known: int) -> int:
        """The first row that was told since it was computed, or never computed."""
        rows = range(max(self.path.num_final, known - MOST_MENDED), known)
        return next((row for row in rows if self._tells_more(row)), known)

    def _tells_more(self, row: int) -> bool:
        """Whether it was told since it was computed."""
        return self._was_told(row) and not self.path.is_told(row)


def _last_tokens(sequence: DraftSequence, count: int) -> list[int]:
    """Committed ones."""
    if count <= len(sequence.output):
        return sequence.output[len(sequence.output) - count :]
    return sequence.prompt[len(sequence.prompt) + len(sequence.output) - count :] + sequence.output
