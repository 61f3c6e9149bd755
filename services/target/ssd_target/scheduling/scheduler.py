"""Which sequence computes what in the next step. Pure Python, no tensors.

A step is at most one prefill forward and one decode forward (``work.py``). Identities take turns in
admission; of one identity, it is first come, first served. It takes blocks for the tokens that
there are and a few more. A sequence that grows takes more; those that only the prefix cache holds
go first. When there are none left, a sequence is *set aside*: the youngest of the identity that
holds most, never the oldest of all, which therefore ends. One that was set aside holds nothing,
comes back in the order of arrival, and computes again what its tokens have left in the cache
(``replay.py``).
"""

from collections import Counter, deque
from dataclasses import dataclass

from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.kvcache.scopes import Scopes
from ssd_engine.kvcache.swap import Swap
from ssd_target.scheduling.kept_kv import KeptKV
from ssd_target.scheduling.replay import PrefillAgain, ReplayInSteps
from ssd_target.scheduling.sequence import Sequence, SequenceEvent, SequenceState
from ssd_target.scheduling.work import StepPlan, Work, WorkPlanner


@dataclass(slots=True)
class CacheCounters:
    prompt_tokens: int = 0
    hit_tokens: int = 0
    set_aside: int = 0  # sequences, each time
    replayed_tokens: int = 0  # that were computed again for it


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        prefill_chunk: int,
        replay_rows: int = 0,
        ahead: int = 2,
        kept: KeptKV | None = None,
    ) -> None:
        """``replay_rows``: tokens that a step can replay; 0: they are prefilled like the prompt.
        ``ahead``: tokens that a sequence may write, beyond those that are committed, until it is
        planned again. ``kept``: where the KV of those that are set aside may go."""
        self.pool, self.kept = pool, kept
        self._swaps: list[Swap] = []
        self._replay: PrefillAgain | ReplayInSteps = PrefillAgain()
        if replay_rows:
            self._replay = ReplayInSteps(replay_rows, prefill_chunk, pool.block_size)
        self._ahead = ahead
        self._arrivals = 0
        self.counters = CacheCounters()
        self._max_num_seqs = max_num_seqs
        self.works = WorkPlanner(prefill_chunk, self._replay)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # the oldest first
        self._scopes: Scopes[str] = Scopes(pool.new_root)
        self._blocked: Sequence | None = None  # until one ends it is not worth another look

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
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._waiting.append(sequence)

    def plan(self) -> StepPlan:
        set_aside = self._make_room()
        if not set_aside:
            self._admit()
        works, running = self.works, self._running.values()
        swaps, self._swaps = self._swaps, []
        return StepPlan(
            works.prefill(running), works.decode(running), works.replay(running), set_aside, swaps
        )

    def advance(self, work: Work, accepted: int, tokens: list[int]) -> list[int]:
        """End a round: its chunk is written, the first ``accepted`` speculated tokens were right.

        ``tokens`` are committed up to a finish; returns those that were. A prefill chunk that is
        not the last ends without a token.
        """
        sequence, committed = work.sequence, []
        if sequence.state is SequenceState.PREFILL:
            sequence.num_written = work.chunk.end
            sequence.num_scored += work.chunk.num_scored
            self._end_prefill(sequence)
        elif sequence.state is SequenceState.REPLAY:
            sequence.num_written = work.chunk.end
            if work.chunk.num_logits:
                sequence.move(SequenceEvent.REPLAYED)
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
        """End all that have not begun; returns them."""
        new = [sequence for sequence in self._waiting if not sequence.stays]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.stays)
        for sequence in new:
            self._end(sequence)
        return new

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        held = sum(seq.lease is not None for seq in self._running.values())
        if held != len(self._running) or len(self._running) > self._max_num_seqs:
            raise RuntimeError("scheduler integrity: a running sequence without a lease")
        if any(seq.lease is not None for seq in self._waiting):
            raise RuntimeError("scheduler integrity: a waiting sequence holds blocks")
        if self.kept is not None:
            self.kept.check_integrity(list(self._waiting))
        arrivals = [seq.arrival for seq in self._waiting]
        if arrivals != sorted(arrivals):
            raise RuntimeError("scheduler integrity: sequences do not wait in their order")
        ages = [seq.arrival for seq in self._running.values()]
        if ages != sorted(ages):
            raise RuntimeError("scheduler integrity: sequences do not run in their order")
        if self.pool.num_leases != held:
            raise RuntimeError("scheduler integrity: a lease without a sequence")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._next_waiting()
            if sequence is self._blocked:
                return
            known = self._cacheable(sequence)
            root, room = self._scopes.root_of(sequence.scope), self._room_for(sequence)
            spare = len(self._running)  # others want to grow, too
            lease = self.pool.open(known, room, root, self._replay.shared_unit, spare)
            if lease is None:
                self._blocked = sequence
                return
            self._waiting.remove(sequence)
            sequence.lease, sequence.num_written = lease, lease.num_cached_tokens
            if self.kept is not None:
                self._swaps += self.kept.bring_back(sequence)
            self._count(sequence)
            sequence.stays += 1
            sequence.move(SequenceEvent.ADMIT)
            self._end_prefill(sequence)
            self._run(sequence)

    def _cacheable(self, sequence: Sequence) -> list[int]:
        """Tokens whose KV may be taken from the prefix cache."""
        if sequence.left_to_score:
            return []
        return sequence.committed()[: self._replay.num_prefilled(sequence)]

    def _next_waiting(self) -> Sequence:
        """The oldest of the identity of which fewest run; of equals the oldest."""
        first: dict[str, Sequence] = {}
        for sequence in self._waiting:
            first.setdefault(sequence.owner, sequence)
        if len(first) == 1:
            return self._waiting[0]
        running = Counter(sequence.owner for sequence in self._running.values())
        return min(first.values(), key=lambda sequence: running[sequence.owner])

    def _run(self, sequence: Sequence) -> None:
        youngest = next(reversed(self._running.values()), None)
        self._running[sequence.id] = sequence
        sequence.room = 0
        if youngest is not None and youngest.arrival > sequence.arrival:
            by_age = sorted(self._running.values(), key=lambda each: each.arrival)
            self._running = {each.id: each for each in by_age}

    def _count(self, sequence: Sequence) -> None:
        """What its admission saves, and what it costs once more."""
        cached, total = sequence.num_written, sequence.num_committed
        if sequence.stays:
            self.counters.replayed_tokens += total - 1 - min(cached, total - 1)
            return
        sequence.num_cached_tokens = cached
        self.counters.prompt_tokens += total
        self.counters.hit_tokens += cached

    def _room_for(self, sequence: Sequence) -> int:
        """Tokens. The last one that is drawn is never written."""
        committed = sequence.num_committed
        return max(committed, min(committed + self._ahead, sequence.max_committed - 1))

    def _make_room(self) -> list[Sequence]:
        """Blocks for what running sequences may write next. Returns those that were set aside."""
        set_aside: list[Sequence] = []
        for sequence in list(self._running.values()):
            if sequence.num_committed + self._ahead <= sequence.room:
                continue
            while not self._reserve(sequence):
                victim = self._victim()
                self._set_aside(victim)
                set_aside.append(victim)
        return set_aside

    def _reserve(self, sequence: Sequence) -> bool:
        """False while there is no room for it."""
        lease = sequence.lease
        if lease is None:  # it was set aside itself
            return True
        if not lease.reserve(self._room_for(sequence)):
            return False
        sequence.room = lease.num_blocks * self.pool.block_size
        return True

    def _victim(self) -> Sequence:
        """The youngest of the identity that holds most; the oldest of all is spared."""
        _, *others = self._running.values()
        if not others:
            raise RuntimeError("the KV cache has no room for a single sequence")
        held: dict[str, int] = {}
        for sequence in self._running.values():
            blocks = sequence.lease.num_blocks if sequence.lease else 0
            held[sequence.owner] = held.get(sequence.owner, 0) + blocks
        return max(others, key=lambda sequence: (held[sequence.owner], sequence.arrival))

    def _set_aside(self, sequence: Sequence) -> None:
        sequence.move(SequenceEvent.SET_ASIDE)
        if self.kept is not None:
            self._swaps += self.kept.keep(sequence)
        self._let_go(sequence)
        sequence.num_written = 0
        before = sum(other.arrival < sequence.arrival for other in self._waiting)
        self._waiting.insert(before, sequence)
        self.counters.set_aside += 1

    def _end_prefill(self, sequence: Sequence) -> None:
        """If there is nothing left of it."""
        if self.works.left_to_prefill(sequence) <= 0:
            replays = self.works.replays(sequence)
            sequence.move(SequenceEvent.REPLAY if replays else SequenceEvent.PREFILLED)

    def _offer_blocks(self, sequence: Sequence) -> None:
        """Whole blocks of committed tokens enter the prefix cache."""
        written = min(sequence.num_written, sequence.num_committed)
        written = self._replay.num_shared(sequence, written)
        if sequence.lease is not None and sequence.lease.can_enter(written):
            sequence.lease.commit(sequence.committed(), written)

    def _end(self, sequence: Sequence) -> None:
        sequence.move(SequenceEvent.END)
        self._blocked = None
        if self.kept is not None:
            self.kept.drop(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        self._running.pop(sequence.id, None)
