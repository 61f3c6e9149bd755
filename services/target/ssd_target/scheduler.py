"""Which sequence computes what in the next step. Pure Python, no tensors.

A step is at most one prefill forward and one decode forward. Prefill is cut at multiples of
``prefill_chunk`` of the sequence's own positions, so that how a prompt is cut does not depend on
what else is running. Admission is first come, first served, and reserves all blocks that a
sequence can need: nothing runs out half way.

Where the bits of a row depend on the shape of its forward (``replay_rows``), a token's KV always
comes from the same kind of forward: the prompt's from prefill on the grid, and only such whole
chunks are shared; that of tokens which were generated once, elsewhere, from steps like those that
generated them.
"""

from collections import deque
from dataclasses import dataclass, field

from ssd_engine.batch import Chunk
from ssd_engine.block_pool import BlockPool
from ssd_target.sequence import Event, Sequence, State


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a forward."""

    sequence: Sequence
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class StepPlan:
    prefill: list[Work] = field(default_factory=list)
    decode: list[Work] = field(default_factory=list)


@dataclass(slots=True)
class CacheCounters:
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Scheduler:
    def __init__(
        self, pool: BlockPool, max_num_seqs: int, prefill_chunk: int, replay_rows: int = 0
    ) -> None:
        """``replay_rows``: tokens that a step can replay; 0: they are prefilled like the prompt."""
        self.pool = pool
        self._replay_rows = replay_rows
        self.counters = CacheCounters()
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._head_blocked = False  # until a sequence ends it is not worth another look

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def plan(self) -> StepPlan:
        self._admit()
        return StepPlan(self._plan_prefill(), self._plan_decode())

    def extend(self, work: Work, speculation: list[int]) -> Work:
        """A decode row that verifies a speculation after its last committed token.

        It gets blocks for the round after it, too: what is prepared of that needs their numbers.
        """
        if not speculation:
            return work
        sequence, start = work.sequence, work.chunk.start
        tokens = [*work.chunk.tokens, *speculation]
        if sequence.lease is not None:
            sequence.lease.grow_ahead(start + 2 * len(tokens))
        return self._work(sequence, Chunk(tokens, start, sequence.blocks, len(tokens)))

    def follow(self, work: Work, token: int) -> Work:
        """The round after one that is still computed, of a sequence that speculates nothing."""
        sequence = work.sequence
        return self._work(sequence, Chunk([token], work.chunk.end, sequence.blocks, 1))

    def advance(self, work: Work, accepted: int, tokens: list[int]) -> list[int]:
        """End a round: its chunk is written, the first ``accepted`` speculated tokens were right.

        ``tokens`` are committed up to a finish; returns those that were. A prefill chunk that is
        not the last ends without a token.
        """
        sequence, committed = work.sequence, []
        if sequence.state is State.PREFILL:
            sequence.num_written = work.chunk.end
            if work.chunk.end == self._num_prefilled(sequence):
                sequence.move(Event.PREFILLED)
        elif not work.chunk.num_logits:
            sequence.num_written = work.chunk.end
        else:
            sequence.num_written = work.chunk.start + 1 + accepted
        for token in tokens:
            sequence.commit(token)
            committed.append(token)
            if sequence.finished:
                break
        self._offer_blocks(sequence)
        if sequence.finished:
            self._end(sequence)
        return committed

    def cancel(self, sequence_id: int) -> None:
        """Free everything that the sequence holds; unknown and ended ones are no error."""
        if sequence_id in self._running:
            self._end(self._running[sequence_id])
            return
        for sequence in self._waiting:
            if sequence.id == sequence_id:
                self._waiting.remove(sequence)
                self._end(sequence)
                return

    def give_back(self) -> list[Sequence]:
        """End all that wait; returns them."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for sequence in waiting:
            self._end(sequence)
        return waiting

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = sum(seq.lease is not None for seq in self._running.values())
        if held != len(self._running) or len(self._running) > self._max_num_seqs:
            raise RuntimeError("scheduler integrity: a running sequence without a lease")
        if any(seq.lease is not None for seq in self._waiting):
            raise RuntimeError("scheduler integrity: a waiting sequence holds blocks")
        if self.pool.num_leases != held:
            raise RuntimeError("scheduler integrity: a lease without a sequence")

    def _admit(self) -> None:
        if self._head_blocked:
            return
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            committed = sequence.committed()
            # The last token that is drawn is never written.
            most = max(len(committed), sequence.max_committed - 1)
            known = sequence.prompt if self._replay_rows else committed
            lease = self.pool.open(known, most, unit=self._shared_unit())
            if lease is None:
                self._head_blocked = True
                return
            self._waiting.popleft()
            sequence.lease = lease
            sequence.num_written = sequence.num_cached_tokens = lease.num_cached_tokens
            sequence.move(Event.ADMIT)
            self._running[sequence.id] = sequence
            self.counters.prompt_tokens += len(committed)
            self.counters.hit_tokens += lease.num_cached_tokens

    def _plan_prefill(self) -> list[Work]:
        """Oldest first, within a budget of one chunk; the first always goes."""
        works: list[Work] = []
        budget = self._prefill_chunk
        for sequence in self._running.values():
            if sequence.state is not State.PREFILL:
                continue
            chunk = self._prefill_piece(sequence)
            if works and len(chunk.tokens) > budget:
                break
            budget -= len(chunk.tokens)
            works.append(self._work(sequence, chunk))
        return works

    def _prefill_piece(self, sequence: Sequence) -> Chunk:
        start, total = sequence.num_written, self._num_prefilled(sequence)
        grid_end = (start // self._prefill_chunk + 1) * self._prefill_chunk
        end = min(grid_end, total)
        tokens = sequence.committed()[start:end]
        return Chunk(tokens, start, sequence.blocks, int(end == sequence.num_committed))

    def replays(self, sequence: Sequence) -> bool:
        """Whether it has tokens that were generated before it came here, and are replayed."""
        return self._num_prefilled(sequence) < sequence.num_committed

    def _num_prefilled(self, sequence: Sequence) -> int:
        if self._replay_rows and sequence.state is not State.DECODE:
            return len(sequence.prompt)
        return sequence.num_committed

    def _plan_decode(self) -> list[Work]:
        return [
            self._work(sequence, self._decode_piece(sequence))
            for sequence in self._running.values()
            if sequence.state is State.DECODE
        ]

    def _decode_piece(self, sequence: Sequence) -> Chunk:
        last = sequence.num_committed - 1
        start = sequence.num_written
        if start >= last:
            return Chunk([sequence.last_token], last, sequence.blocks, 1)
        tokens = sequence.committed()[start : min(last, start + self._replay_rows)]
        return Chunk(tokens, start, sequence.blocks, 0)

    def _work(self, sequence: Sequence, chunk: Chunk) -> Work:
        if sequence.lease is not None:
            sequence.lease.grow(chunk.end)
        return Work(sequence, chunk)

    def _offer_blocks(self, sequence: Sequence) -> None:
        """Whole blocks of committed tokens enter the prefix cache."""
        written = min(sequence.num_written, sequence.num_committed)
        if self._replay_rows:
            written = min(written, len(sequence.prompt))
            written -= written % self._prefill_chunk
        if sequence.lease is not None and sequence.lease.can_enter(written):
            sequence.lease.commit(sequence.committed(), written)

    def _shared_unit(self) -> int:
        return self._prefill_chunk // self.pool.block_size if self._replay_rows else 1

    def _end(self, sequence: Sequence) -> None:
        sequence.move(Event.END)
        self._head_blocked = False
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        self._running.pop(sequence.id, None)
