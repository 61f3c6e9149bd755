"""What running sequences compute in the next step: pieces of prompts, replays, rounds.

Prefill is cut at multiples of ``prefill_chunk`` of the sequence's own positions, so that how a
prompt is cut does not depend on what else is running. Identities take turns in it (``turns.py``).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ssd_engine.forward.batch import Chunk
from ssd_engine.kvcache.swap import Swap
from ssd_engine.speculation.speculation import NOTHING, Speculation
from ssd_target.scheduling.replay import PrefillAgain, ReplayInSteps
from ssd_target.scheduling.sequence import Sequence, SequenceState
from ssd_target.scheduling.turns import PrefillTurns


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a forward."""

    sequence: Sequence
    chunk: Chunk
    stay: int = 0  # the sequence's ``stays`` when this was planned
    speculation: Speculation = NOTHING  # that is verified
    num_certain: int = 0  # tokens of that, the first ones, that need no logits to be right

    @property
    def is_over(self) -> bool:
        """Its sequence has ended meanwhile, or was set aside."""
        sequence = self.sequence
        return sequence.lease is None or sequence.stays != self.stay


@dataclass(frozen=True, slots=True)
class StepPlan:
    prefill: list[Work] = field(default_factory=list)
    decode: list[Work] = field(default_factory=list)
    replay: list[Work] = field(default_factory=list)  # in the decode forward, too
    set_aside: list[Sequence] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)  # before anything is computed

    @property
    def has_round(self) -> bool:
        return bool(self.decode or self.replay)


class WorkPlanner:
    def __init__(self, prefill_chunk: int, replay: PrefillAgain | ReplayInSteps) -> None:
        self._prefill_chunk, self._replay = prefill_chunk, replay
        self._turns = PrefillTurns()

    def prefill(self, running: Collection[Sequence]) -> list[Work]:
        """Within a budget of one chunk; the first always goes."""
        reading = [each for each in running if each.state is SequenceState.PREFILL]
        if len(reading) > 1:
            reading = self._turns.choose(
                reading, self.left_to_prefill, self._piece_size, self._prefill_chunk
            )
        return [_work(each, self._prefill_piece(each)) for each in reading]

    def decode(self, running: Collection[Sequence]) -> list[Work]:
        return [
            _work(each, Chunk([each.last_token], each.num_committed - 1, each.blocks, 1))
            for each in running
            if each.state is SequenceState.DECODE
        ]

    def replay(self, running: Collection[Sequence]) -> list[Work]:
        if isinstance(self._replay, PrefillAgain):
            return []
        piece = self._replay.piece
        return [_work(each, piece(each)) for each in running if each.state is SequenceState.REPLAY]

    def replays(self, sequence: Sequence) -> bool:
        """Whether it has tokens that were generated before it came here, and are replayed."""
        return self._replay.num_prefilled(sequence) < sequence.num_committed

    def left_to_prefill(self, sequence: Sequence) -> int:
        return self._replay.num_prefilled(sequence) - sequence.num_written

    def _piece_size(self, sequence: Sequence) -> int:
        return self._piece_end(sequence) - sequence.num_written

    def _piece_end(self, sequence: Sequence) -> int:
        grid_end = (sequence.num_written // self._prefill_chunk + 1) * self._prefill_chunk
        return min(grid_end, self._replay.num_prefilled(sequence))

    def _prefill_piece(self, sequence: Sequence) -> Chunk:
        start, end = sequence.num_written, self._piece_end(sequence)
        tokens = sequence.committed()[start:end]
        num_logits = int(end == sequence.num_committed)
        return Chunk(tokens, start, sequence.blocks, num_logits, _num_scored(sequence, start, end))


def _num_scored(sequence: Sequence, start: int, end: int) -> int:
    """A piece that is computed again ends where it did before: all of it was told then."""
    if start < sequence.num_scored:
        return 0
    return min(end - start, sequence.left_to_score)


def extended(work: Work, speculation: Speculation, num_certain: int = 0) -> Work:
    """A decode row that verifies a speculation after its last committed token.

    It gets blocks for the round after it, too: what is prepared of that needs their numbers. Whose
    log probabilities are told needs the logits of certain tokens, too.
    """
    if not speculation:
        return work
    sequence, start = work.sequence, work.chunk.start
    certain = num_certain if sequence.num_logprobs is None else 0
    tokens = [*work.chunk.tokens, *speculation.tokens]
    if sequence.lease is not None:
        sequence.lease.grow_ahead(start + 2 * len(tokens))
    chunk = Chunk(tokens, start, sequence.blocks, len(tokens) - certain)
    return _work(sequence, chunk, speculation, certain)


def following(work: Work, token: int) -> Work:
    """The round after one that is still computed, of a sequence that speculates nothing."""
    sequence = work.sequence
    return _work(sequence, Chunk([token], work.chunk.end, sequence.blocks, 1))


def _work(
    sequence: Sequence, chunk: Chunk, speculation: Speculation = NOTHING, num_certain: int = 0
) -> Work:
    if sequence.lease is not None:
        sequence.lease.grow(chunk.end)
    return Work(sequence, chunk, sequence.stays, speculation, num_certain)
