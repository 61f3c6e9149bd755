"""Computes rows once more that the prefix cache has spared, for what they tell a head.

Nothing waits for it: a piece is computed where no prompt is, between two rounds. What it writes
goes to blocks that nobody else reads, and is left there; the cached blocks stay as they are.
"""

from ssd_engine.forward.batch import Chunk
from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.engine.prompt_scoring import PromptScoring
from ssd_target.engine.target_runner import TargetRunner
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence
from ssd_target.speculation.coordinator import SpeculationCoordinator

PIECE = 256  # rows of a step
PATIENCE = 4  # steps in which prompts go first


class RereadForward:
    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        speculator: SpeculationCoordinator,
        prefill_chunk: int,
        trace: Trace,
    ) -> None:
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._piece, self._trace = min(PIECE, prefill_chunk), trace
        self._waited = 0

    def run(self, prompts_first: bool) -> None:
        """The next piece, if there is one. ``prompts_first``: a prefill was computed just now."""
        lack = self._speculator.next_lack()
        if lack is None:
            self._waited = 0
        elif prompts_first and self._waited < PATIENCE:
            self._waited += 1
        else:
            self._waited = 0
            self._read(*lack)

    def _read(self, sequence: Sequence, missing: range) -> None:
        chunk = self._chunk(sequence, missing)
        if chunk is None:
            self._speculator.give_up_lack(sequence)
            return
        begin, scoring = self._trace.now(), PromptScoring([])
        flush = self._speculator.endpoints.flush
        self._runner.forward([chunk], flush, scoring.take)
        if (features := self._runner.features) is not None:
            self._speculator.tell_again(sequence, chunk.start, features)
        width = len(chunk.tokens)
        self._trace.span(TraceEventKind.PREFILL, begin, self._trace.now(), rows=width)

    def _chunk(self, sequence: Sequence, missing: range) -> Chunk | None:
        """The last rows that are missing, in blocks of their own after those that the sequence
        has; None where there is no room for them, or nothing before them any more."""
        pool, end = self._scheduler.pool, missing.stop
        size = pool.block_size
        if sequence.lease is None or sequence.num_written < end:
            return None
        start = missing.start // size * size
        if end - start > self._piece:
            start = -(-(end - self._piece) // size) * size
        spare = self._scheduler.num_running  # others want to grow
        lease = pool.open((), end - start, spare=spare)
        if lease is None:
            return None
        lease.grow(end - start)
        blocks = [*sequence.blocks[: start // size], *lease.blocks]
        # What is launched later is computed later: nobody writes there before.
        lease.release()
        return Chunk(sequence.committed()[start:end], start, blocks, 0)
