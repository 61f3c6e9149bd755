"""A head inside the target's engine: drafts from what the target's own forwards tell.

A head has a text of its own for each sequence. It begins where the target's features do: at the
first token that is not cached, until the target has computed a window before it once more; or later
where the text has grown beyond what the head can follow. What is before, the head does not see.
Rows that the target has told are computed with its features, in order; drafted tokens go on from
the head's own states and are computed again when they are told.
"""

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.block_pool import BlockLease, BlockPool
from ssd_target.records.speculation_options import HEAD_WINDOW
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.sync_drafter import (
    ChainedRow,
    DraftRow,
    add_guesses,
    draft_in_a_chain,
    draw_of,
)


@dataclass(slots=True, eq=False)
class _HeadText:
    base: int  # the position in the sequence of its first row
    kept_from: int  # the position of the first features that are kept
    end: int  # after the last one that was told
    kept: deque[Tensor] = field(default_factory=deque)
    lease: BlockLease | None = None
    num_bytes: int = 0  # that are kept
    num_read: int = 0  # rows, the first ones, that were computed as the target has told them

    @property
    def num_told(self) -> int:
        """Rows, read or not."""
        return self.end - self.base

    def forget_oldest(self) -> int:
        """Returns how many bytes are free."""
        piece = self.kept.popleft()
        self.kept_from += len(piece)
        self.num_bytes -= piece.nbytes
        return piece.nbytes

    def features(self, begin: int, end: int) -> Tensor:
        """Those of some rows [end - begin, width], all of which are kept."""
        pieces, at = [], self.kept_from - self.base
        for piece in self.kept:
            pieces.append(piece[max(0, begin - at) : max(0, end - at)])
            at += len(piece)
        return torch.cat(pieces)


class HeadDrafter:
    """The interface of ``SyncDrafter``."""

    reads_features = True

    def __init__(
        self,
        runner: HeadRunner,
        block_size: int,
        max_context: int,
        depth: int,
        prefill_chunk: int,
        max_bytes: int = 1 << 40,
    ) -> None:
        """``max_bytes``: of features that are kept."""
        self._runner, self._pool = runner, BlockPool(runner.num_blocks, block_size)
        self._block_size = block_size
        self._max_context, self._depth, self._prefill_chunk = max_context, depth, prefill_chunk
        self._window = min(HEAD_WINDOW, max_context // 2)
        self._texts: dict[int, _HeadText] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0
        # Positions before a text that the target's prefix cache has spared.
        self.lacks: dict[int, range] = {}

    # What it is told

    def take_features(self, sequence_id: int, start: int, rows: Tensor) -> None:
        text = self._texts.get(sequence_id)
        if text is not None and start > text.end:  # some are missing: a text that begins here
            self.end(sequence_id)
            text = None
        if text is None:
            text = self._texts[sequence_id] = _HeadText(start, start, start)
            if before := range(max(0, start + len(rows) - self._window), start):
                self.lacks[sequence_id] = before
        new = rows[text.end - start :]
        if not len(new):
            return
        text.kept.append(new.clone())
        text.end += len(new)
        self._count(text, new.nbytes)
        while text.end - text.kept_from - len(text.kept[0]) >= self._window:
            self._num_bytes -= text.forget_oldest()
        self._make_room()

    def _count(self, text: _HeadText, num_bytes: int) -> None:
        text.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _make_room(self) -> None:
        """The longest texts lose their beginnings, and begin again later."""
        while self._num_bytes > self._max_bytes:
            shrinking = [text for text in self._texts.values() if len(text.kept) > 1]
            if not shrinking:
                return
            self._num_bytes -= max(shrinking, key=lambda text: text.num_bytes).forget_oldest()

    def tell_again(self, sequence_id: int, start: int, rows: Tensor) -> None:
        text, lack = self._texts[sequence_id], self.lacks[sequence_id]
        if text.kept_from != start + len(rows):  # it has outgrown the window meanwhile
            self.give_up_lack(sequence_id)
            return
        text.kept.appendleft(rows.clone())
        text.kept_from = start
        self._count(text, rows.nbytes)
        self.lacks[sequence_id] = range(lack.start, start)
        if start <= lack.start:
            self.give_up_lack(sequence_id)
            self._begin_again(text)
        self._make_room()

    def give_up_lack(self, sequence_id: int) -> None:
        self.lacks.pop(sequence_id, None)

    def is_behind(self, sequence: Sequence) -> bool:
        text = self._texts.get(sequence.id)
        return text is None or text.num_told - text.num_read > self._depth + 1

    def end(self, sequence_id: int) -> None:
        self.give_up_lack(sequence_id)
        text = self._texts.pop(sequence_id, None)
        if text is None:
            return
        self._num_bytes -= text.num_bytes
        if text.lease is not None:
            text.lease.release()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        held = sum(text.lease is not None for text in self._texts.values())
        if self._pool.num_leases != held:
            raise RuntimeError("head drafter integrity: a lease without a sequence")
        kept = [sum(piece.nbytes for piece in text.kept) for text in self._texts.values()]
        if (
            kept != [text.num_bytes for text in self._texts.values()]
            or sum(kept) != self._num_bytes
        ):
            raise RuntimeError("head drafter integrity: features are not counted right")

    # Drafting

    def draft(self, rows: Rows[DraftRow]) -> None:
        drafting = [_Drafting(row, text) for row in rows if (text := self._follow(row)) is not None]
        chains = self._runner.chains
        while left := [e for e in drafting if not e.is_done and not (chains and e.goes_on)]:
            self._step(left)
        if chained := [each.chained() for each in drafting if not each.is_done]:
            draft_in_a_chain(self._runner, self._block_size, chained)

    def _follow(self, row: DraftRow) -> _HeadText | None:
        """The text of a row that wants tokens; None where too little was told, or has no room."""
        text = self._texts.get(row.sequence.id)
        if text is None or text.end != row.sequence.num_committed - 1:
            return None
        if len(row.tokens) >= row.depth:
            return None
        if text.base + text.num_read < text.kept_from or self._needed(text) > self._max_context:
            self._begin_again(text)
        needed = self._needed(text)
        if text.lease is None:
            text.lease = self._pool.open((), needed)
        elif not text.lease.reserve(needed):
            text.lease.release()
            text.lease, text.num_read = None, 0
        if text.lease is None:
            return None
        text.lease.grow(needed)
        # What comes next is known after the last row: it is read once more where it was read.
        text.num_read = min(text.num_read, text.num_told - 1)
        return text

    def _needed(self, text: _HeadText) -> int:
        """Rows of the text, with those of the longest speculation."""
        return text.num_told + self._depth

    def _begin_again(self, text: _HeadText) -> None:
        """Where features are still kept: of so many positions at the most."""
        if text.lease is not None:
            text.lease.release()
        text.lease, text.num_read = None, 0
        text.base = max(text.kept_from, text.end - self._window)

    def _step(self, drafting: list["_Drafting"]) -> None:
        """The next forward: of what is to be read, as much as a prefill reads; of others a row."""
        left = self._prefill_chunk
        now: list[_Drafting] = []
        chunks: list[Chunk] = []
        counts: list[int] = []
        told: list[Tensor] = []
        for each in drafting:
            if each.num_unread and left <= 0:
                continue
            chunk = each.next_chunk(max(left, 1))
            now.append(each)
            chunks.append(chunk)
            counts.append(len(chunk.tokens) if each.num_unread else 0)
            if counts[-1]:
                told.append(each.text.features(chunk.start, chunk.end))
            left -= counts[-1]
        given = GivenFeatures(counts, torch.cat(told) if told else torch.empty(0))
        guessing = [e.row for e, chunk in zip(now, chunks, strict=True) if chunk.num_logits]
        draws = list(map(draw_of, guessing))
        scored = self._runner.step_with_features(chunks, draws, given).result()
        for each, chunk in zip(now, chunks, strict=True):
            each.wrote(chunk)
        if guessing:
            add_guesses(guessing, scored)


class _Drafting:
    """A row that gets its tokens."""

    def __init__(self, row: DraftRow, text: _HeadText) -> None:
        self.row, self.text = row, text
        self._fed = 0  # of its tokens, those that the head has read

    @property
    def is_done(self) -> bool:
        return len(self.row.tokens) >= self.row.depth

    @property
    def num_unread(self) -> int:
        return self.text.num_told - self.text.num_read

    @property
    def goes_on(self) -> bool:
        """Whether its next token is a row away."""
        return not self.num_unread and self._fed + 1 == len(self.row.tokens)

    def chained(self) -> ChainedRow:
        return ChainedRow(self.row, self.next_chunk(1), self.text.num_told)

    def next_chunk(self, limit: int) -> Chunk:
        """Told rows first; then a token a forward, as each goes on from what the last one left."""
        row, text = self.row, self.text
        blocks = [] if text.lease is None else text.lease.blocks
        if self.num_unread:
            count = min(limit, self.num_unread)
            first = text.base + text.num_read + 1
            tokens = _tokens(row.sequence, first, first + count)
            wanted = count == self.num_unread and not row.tokens
            return Chunk(tokens, text.num_read, blocks, int(wanted))
        start = text.num_told + self._fed
        wanted = self._fed + 1 == len(row.tokens)
        return Chunk([row.tokens[self._fed]], start, blocks, int(wanted))

    def wrote(self, chunk: Chunk) -> None:
        if self.num_unread:
            self.text.num_read = chunk.end
        else:
            self._fed += 1


def _tokens(sequence: Sequence, begin: int, end: int) -> list[int]:
    """Committed ones, by their positions."""
    length = len(sequence.prompt)
    if begin >= length:
        return sequence.output[begin - length : end - length]
    return sequence.prompt[begin:end] + sequence.output[: max(0, end - length)]
