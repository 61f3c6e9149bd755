"""A draft model inside the target's engine: drafts, then the target verifies, in turns.

No hop and no prediction of outcomes: the strong baseline that asynchronous speculation is held
against.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from ssd_engine.batch import Chunk, Draw, Part
from ssd_engine.block_pool import BlockPool
from ssd_engine.cached_path import CachedPath, NoRoom
from ssd_engine.guessing import drawn_guesses, ranked_guesses, sample_row
from ssd_engine.rejection import Wire
from ssd_engine.sampling import SampleRow
from ssd_engine.scored import Pending, Scored
from ssd_target.sequence import Sequence

FAN_OUT = 3  # likeliest tokens that rejection's down-weighting is applied to


class Runner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    def step(self, parts: Rows[Part], draws: Rows[Draw | None]) -> Pending: ...


@dataclass(slots=True, eq=False)
class DraftRow:
    sequence: Sequence
    depth: int
    down_weight: float | None  # of rejection verification; None: coupled
    tokens: list[int] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)  # a row each: what tokens were drawn from


class SyncDrafter:
    def __init__(
        self, runner: Runner, block_size: int, max_context: int, depth: int, prefill_chunk: int
    ) -> None:
        self._runner = runner
        self._pool = BlockPool(runner.num_blocks, block_size)
        self._max_context = max_context
        self._depth = depth
        self._prefill_chunk = prefill_chunk
        self._paths: dict[int, CachedPath] = {}

    def draft(self, rows: Rows[DraftRow]) -> None:
        """Fill every row; it stays empty where the draft model has no room for its sequence."""
        served = [row for row in rows if self._follow(row.sequence)]
        while unfinished := [row for row in served if len(row.tokens) < row.depth]:
            self._extend(unfinished)

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether it must read more of the text first than a round of its own adds."""
        path = self._paths.get(sequence.id)
        return path is None or sequence.num_committed - path.num_known > self._depth + 1

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
        if sequence.num_committed + self._depth >= self._max_context:
            self.end(sequence.id)
            return False
        try:
            self._paths[sequence.id] = self._followed(sequence)
        except NoRoom:
            self.end(sequence.id)
            return False
        return True

    def _followed(self, sequence: Sequence) -> CachedPath:
        path = self._paths.get(sequence.id)
        if path is None:
            ahead, most = self._depth + 1, sequence.max_committed + self._depth
            most, spare = min(most, self._max_context), len(self._paths)
            return CachedPath(self._pool, sequence.committed(), ahead, most, spare=spare)
        path.reserve(sequence.num_committed)
        new = sequence.num_committed - len(path.committed)
        path.commit(sequence.output[len(sequence.output) - new :] if new else ())
        return path

    def _extend(self, rows: Rows[DraftRow]) -> None:
        """One more guess for each, after as many forwards as its prompt needs."""
        pending = list(rows)
        while pending:
            now, chunks = self._next_chunks(pending)
            draws = [
                _draw(row)
                for row, chunk in zip(now, chunks, strict=True)
                for _ in range(chunk.num_logits)
            ]
            scored = self._runner.step(chunks, draws).result()
            done: list[DraftRow] = []
            for row, chunk in zip(now, chunks, strict=True):
                self._paths[row.sequence.id].wrote(chunk)
                if chunk.num_logits:
                    done.append(row)
            if done:
                _guess(done, scored)
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
            path = self._paths[row.sequence.id]
            limit = left if behind else self._prefill_chunk
            chunks.append(path.next_chunk(row.tokens, 1, limit))
            rows.append(row)
            left -= len(chunks[-1].tokens) if behind else 0
        return rows, chunks


def _draw(row: DraftRow) -> Draw:
    """How the device chooses a row's next token."""
    sequence = row.sequence
    position = sequence.num_committed + len(row.tokens)
    draw = Draw.of(sequence.sampling, position, sequence.history, path=tuple(row.tokens))
    if row.down_weight is None:
        return draw
    return draw._replace(width=FAN_OUT, down_weight=row.down_weight)


def _guess(rows: Rows[DraftRow], scored: Scored) -> None:
    """The next token of each row."""
    if scored.following is not None:
        for i, (row, token) in enumerate(zip(rows, scored.following.tolist(), strict=True)):
            row.tokens.append(token)
            if row.down_weight is not None and scored.sigma is not None:
                row.wires.append(scored.sigma[i : i + 1])
        return
    logits = scored.logits
    coupled = [i for i, row in enumerate(rows) if row.down_weight is None]
    drawing = [i for i, row in enumerate(rows) if row.down_weight is not None]
    if coupled:
        guesses = ranked_guesses(logits[coupled], [_sample_row(rows[i]) for i in coupled], 1)
        for i, guess in zip(coupled, guesses, strict=True):
            rows[i].tokens.append(guess[0])
    if drawing:
        weights = [rows[i].down_weight or 0.0 for i in drawing]
        samples = [_sample_row(rows[i]) for i in drawing]
        tokens, wire = drawn_guesses(logits[drawing], samples, [FAN_OUT] * len(drawing), weights)
        for j, i in enumerate(drawing):
            rows[i].tokens.append(tokens[j])
            rows[i].wires.append(wire[j : j + 1])


def _sample_row(row: DraftRow) -> SampleRow:
    sequence = row.sequence
    return sample_row(sequence.sampling, sequence.prompt, sequence.output, row.tokens)
