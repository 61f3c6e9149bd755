"""A draft model inside the target's engine: drafts, then the target verifies, in turns.

No hop and no prediction of outcomes: the strong baseline that asynchronous speculation is held
against.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ssd_engine.forward.batch import Chunk, Draw, Part, slots_at
from ssd_engine.forward.result import ForwardResult, ImmediateForward, PendingForward
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.kvcache.cached_path import CachedPath, NoRoom
from ssd_engine.kvcache.scopes import Scopes
from ssd_engine.sampling.guesses import (
    NO_GUESS,
    best_of,
    drawn_guesses,
    ranked_guesses,
    sample_row,
)
from ssd_engine.sampling.rejection import Wire
from ssd_engine.sampling.sampler import SampleRow
from ssd_target.config import DRAFT_STEP_ROWS
from ssd_target.scheduling.sequence import Sequence

STEPPED_ROWS = 4 * DRAFT_STEP_ROWS  # more tokens are read by a prefill
FAN_OUT = 3  # likeliest tokens that rejection's down-weighting is applied to


class DrafterRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def chains(self) -> bool: ...

    def step(self, parts: Rows[Part], draws: Rows[Draw | None]) -> PendingForward: ...

    def deepen(
        self, flight: PendingForward, slots: Rows[int], widths: Rows[int]
    ) -> PendingForward | None: ...


class Drafter(Protocol):
    reads_features: bool  # of the target's rows

    @property
    def lacks(self) -> Mapping[int, range]:
        """By sequence, positions of rows that it would have to be told."""

    def draft(self, rows: "Rows[DraftRow]") -> None:
        """Fill every row; it stays as it is where there is no room for its sequence."""

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether it must read more of the text first than a round of its own adds."""

    def take_features(self, sequence_id: int, start: int, rows: Tensor) -> None:
        """What the target's rows told from position ``start`` on, all of whose tokens and the one
        after them are committed."""

    def tell_again(self, sequence_id: int, start: int, rows: Tensor) -> None:
        """What the last rows that it lacks told, from position ``start`` on."""

    def give_up_lack(self, sequence_id: int) -> None:
        """The rows that it lacks will not be told."""

    def end(self, sequence_id: int) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass(slots=True, eq=False)
class DraftRow:
    sequence: Sequence
    depth: int
    down_weight: float | None  # for rejection verification; None: coupled
    tokens: list[int] = field(default_factory=list)  # it may begin with some that are certain
    wires: list[Wire] = field(default_factory=list)  # a row each: what tokens were drawn from

    def add(self, token: int, wire: Wire | None) -> None:
        """The next one; with NO_GUESS the speculation ends where it is, whatever comes later."""
        if token == NO_GUESS:
            self.depth = len(self.tokens)
        elif len(self.tokens) < self.depth:
            self.tokens.append(token)
            if wire is not None:
                self.wires.append(wire)


@dataclass(frozen=True, slots=True)
class ChainedRow:
    """A row whose tokens are drafted one after the other."""

    row: DraftRow
    first: Chunk  # after which its next token is known
    begin: int  # where the cache of its sequence has the first of its tokens

    @property
    def place(self) -> int:
        """Where the token after those that are known will be."""
        return self.begin + len(self.row.tokens)


@dataclass(frozen=True, slots=True)
class _PendingGuesses:
    """A forward that was launched for the next token of some rows, the ``count``-th of each."""

    rows: list[ChainedRow]
    forward: PendingForward
    count: int


class SyncDrafter:
    reads_features = False
    lacks: Mapping[int, range] = {}

    def __init__(
        self,
        runner: DrafterRunner,
        block_size: int,
        max_context: int,
        depth: int,
        prefill_chunk: int,
    ) -> None:
        self._runner, self._block_size = runner, block_size
        self._pool = BlockPool(runner.num_blocks, block_size)
        self._scopes: Scopes[str] = Scopes(self._pool.new_root)
        self._max_context, self._depth, self._prefill_chunk = max_context, depth, prefill_chunk
        self._paths: dict[int, CachedPath] = {}

    def draft(self, rows: Rows[DraftRow]) -> None:
        """Fill every row; it stays empty where the draft model has no room for its sequence."""
        served = [row for row in rows if self._follow(row.sequence)]
        wanting = [row for row in served if len(row.tokens) < row.depth]
        if self._runner.chains and wanting:
            self._catch_up(wanting)
            self._draft_in_a_chain(wanting)
            return
        while unfinished := [row for row in served if len(row.tokens) < row.depth]:
            self._extend(unfinished)

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether it must read more of the text first than a round of its own adds."""
        path = self._paths.get(sequence.id)
        return path is None or sequence.num_committed - path.num_known > self._depth + 1

    def _catch_up(self, rows: Rows[DraftRow]) -> None:
        """Until the next token of each takes a step of few rows. What is missing is read by such
        steps, too, where it is little: the device computes them one after the other."""
        few = min(DRAFT_STEP_ROWS, self._prefill_chunk)
        paths = [(self._paths[row.sequence.id], row.tokens) for row in rows]
        while behind := [(p, tokens) for p, tokens in paths if p.num_missing(tokens) > few]:
            near = all(path.num_missing(tokens) <= STEPPED_ROWS for path, tokens in behind)
            chunks: list[Chunk] = []
            left = len(behind) * few if near else self._prefill_chunk
            for path, tokens in behind:
                size = min(few if near else left, path.num_missing(tokens) - 1)
                if size:
                    chunks.append(path.next_chunk(tokens, 0, size))
                    path.wrote(chunks[-1])  # it will be, before anybody asks
                    left -= size
            forward = self._runner.step(chunks, [])
            if isinstance(forward, ImmediateForward):
                forward.result()

    def take_features(self, sequence_id: int, start: int, rows: Tensor) -> None:
        """A model of its own reads none."""

    def tell_again(self, sequence_id: int, start: int, rows: Tensor) -> None:
        """Likewise."""

    def give_up_lack(self, sequence_id: int) -> None:
        """Likewise."""

    def end(self, sequence_id: int) -> None:
        path = self._paths.pop(sequence_id, None)
        if path is not None:
            path.release()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        if self._pool.num_leases != len(self._paths):
            raise RuntimeError("sync drafter integrity: a lease without a sequence")

    def _follow(self, sequence: Sequence) -> bool:
        """Bring the path up to what is committed; False when there is no room for it."""
        try:
            self._paths[sequence.id] = self._followed(sequence)
        except NoRoom:
            self.end(sequence.id)
            return False
        return True

    def _followed(self, sequence: Sequence) -> CachedPath:
        if sequence.num_committed + self._depth >= self._max_context:
            raise NoRoom("beyond the draft model's context")
        path = self._paths.get(sequence.id)
        if path is None:
            ahead, most = self._depth + 1, sequence.max_committed + self._depth
            most, spare = min(most, self._max_context), len(self._paths)
            root = self._scopes.root_of(sequence.scope)
            return CachedPath(self._pool, sequence.committed(), ahead, most, root, spare)
        path.reserve(sequence.num_committed)
        new = sequence.num_committed - len(path.committed)
        path.commit(sequence.output[len(sequence.output) - new :] if new else ())
        return path

    def _draft_in_a_chain(self, rows: Rows[DraftRow]) -> None:
        chained = []
        for row in rows:
            path = self._paths[row.sequence.id]
            path.grow(row.depth)
            first = path.next_chunk(row.tokens, 1, self._prefill_chunk)
            chained.append(ChainedRow(row, first, len(path.committed)))
        draft_in_a_chain(self._runner, self._block_size, chained)
        for each in chained:
            path = self._paths[each.row.sequence.id]
            path.wrote(each.first)
            path.guessed(each.row.tokens[:-1])

    def _extend(self, pending: Rows[DraftRow]) -> None:
        """One more guess for each, after as many forwards as its prompt needs."""
        while pending:
            now, chunks = self._next_chunks(pending)
            done = [row for row, chunk in zip(now, chunks, strict=True) if chunk.num_logits]
            scored = self._runner.step(chunks, list(map(draw_of, done))).result()
            for row, chunk in zip(now, chunks, strict=True):
                self._paths[row.sequence.id].wrote(chunk)
            if done:
                add_guesses(done, scored)
            pending = [row for row in pending if row not in done]

    def _next_chunks(self, pending: Rows[DraftRow]) -> tuple[list[DraftRow], list[Chunk]]:
        """Those of the next forward: what texts it reads, together, is a chunk's length at most."""
        rows: list[DraftRow] = []
        chunks: list[Chunk] = []
        left = self._prefill_chunk
        for row in pending:
            behind = self.is_behind(row.sequence)
            if behind and left <= 0:
                continue
            limit = left if behind else self._prefill_chunk
            chunks.append(self._paths[row.sequence.id].next_chunk(row.tokens, 1, limit))
            rows.append(row)
            left -= len(chunks[-1].tokens) if behind else 0
        return rows, chunks


def draft_in_a_chain(runner: DrafterRunner, block_size: int, rows: Rows[ChainedRow]) -> None:
    """Each token is launched before the one before it is known here."""
    chunks = [each.first for each in rows]
    forward = runner.step(chunks, [draw_of(each.row) for each in rows])
    guesses = _PendingGuesses(list(rows), forward, 1)
    while guesses.rows:
        ahead = _launch_ahead(runner, block_size, guesses)
        add_guesses([each.row for each in guesses.rows], guesses.forward.result())
        guesses = ahead


def _launch_ahead(
    runner: DrafterRunner, block_size: int, guesses: _PendingGuesses
) -> _PendingGuesses:
    """The guesses after these."""
    count = guesses.count + 1
    rows = [each for each in guesses.rows if each.row.depth > len(each.row.tokens) + 1]
    if not rows:
        return _PendingGuesses([], guesses.forward, count)
    if guesses.count > 1 and len(rows) == len(guesses.rows):
        slots = [slots_at(each.first.blocks, [each.place], block_size)[0] for each in rows]
        widths = [-1 if each.row.down_weight is None else FAN_OUT for each in rows]
        forward = runner.deepen(guesses.forward, slots, widths)
        if forward is not None:
            return _PendingGuesses(rows, forward, count)
    row_of = dict(zip(map(id, guesses.rows), guesses.forward.rows, strict=True))
    chunks = [Chunk([-row_of[id(each)] - 1], each.place, each.first.blocks, 1) for each in rows]
    draws = [draw_of(each.row, in_flight=True) for each in rows]
    return _PendingGuesses(rows, runner.step(chunks, draws), count)


def draw_of(row: DraftRow, in_flight: bool = False) -> Draw:
    """How the device chooses a row's next token. ``in_flight``: one comes before it that is not
    known here."""
    sequence, recent = row.sequence, int(in_flight)
    position, path = sequence.num_committed + len(row.tokens) + recent, tuple(row.tokens)
    draw = Draw.of(sequence.sampling, position, sequence.history, recent, path)
    if row.down_weight is None:
        return draw
    return draw._replace(width=FAN_OUT, down_weight=row.down_weight)


def add_guesses(rows: Rows[DraftRow], scored: ForwardResult) -> None:
    """The next token of each row."""
    if scored.following is not None:
        for i, (row, token) in enumerate(zip(rows, scored.following.tolist(), strict=True)):
            sigma = None if row.down_weight is None else scored.sigma
            row.add(token, None if sigma is None else sigma[i : i + 1])
        return
    logits = scored.logits
    coupled = [i for i, row in enumerate(rows) if row.down_weight is None]
    drawing = [i for i, row in enumerate(rows) if row.down_weight is not None]
    if coupled:
        guesses = ranked_guesses(logits[coupled], [_sample_row(rows[i]) for i in coupled], 1)
        for i, guess in zip(coupled, guesses, strict=True):
            rows[i].add(best_of(guess), None)
    if drawing:
        weights = [rows[i].down_weight or 0.0 for i in drawing]
        samples = [_sample_row(rows[i]) for i in drawing]
        tokens, wire = drawn_guesses(logits[drawing], samples, [FAN_OUT] * len(drawing), weights)
        for j, i in enumerate(drawing):
            rows[i].add(tokens[j], wire[j : j + 1])


def _sample_row(row: DraftRow) -> SampleRow:
    sequence = row.sequence
    return sample_row(
        sequence.sampling, sequence.prompt, sequence.output, row.tokens, sequence.grammar
    )
