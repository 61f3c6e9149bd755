"""The engine: schedule, run, verify, commit. No gRPC, no tokenizer, no processes."""

from collections.abc import Sequence as Tokens
from typing import Protocol

from torch import Tensor

from ssd_engine.batch import Chunk
from ssd_engine.block_pool import BlockPool
from ssd_target.records import Cancel, Delta, Stats, StepOutput, Submit, unpack_tokens
from ssd_target.scheduler import Scheduler, Work
from ssd_target.sequence import Sequence
from ssd_target.verifier import NonFiniteLogits, Outcome, verify

NON_FINITE = "the model gave non-finite logits for this request (weights or dtype overflow)"


class Runner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    def forward(self, chunks: Tokens[Chunk]) -> Tensor | None: ...


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        token_bytes: Tokens[bytes],
        block_size: int,
        max_num_seqs: int,
        prefill_chunk: int,
    ) -> None:
        self._runner = runner
        self._token_bytes = token_bytes
        self._steps = 0
        pool = BlockPool(runner.num_blocks, block_size)
        self.scheduler = Scheduler(pool, max_num_seqs, prefill_chunk)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def handle(self, record: Submit | Cancel) -> None:
        if isinstance(record, Submit):
            self.scheduler.add(self._sequence(record))
        else:
            self.scheduler.cancel(record.sequence)

    def step(self) -> StepOutput:
        plan = self.scheduler.plan()
        deltas = self._run(plan.prefill) + self._run(plan.decode)
        self._steps += 1
        return StepOutput(deltas, self.stats())

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            used_blocks=pool.num_used,
            reserved_blocks=pool.num_reserved,
            cached_blocks=pool.num_cached,
            prompt_tokens=scheduler.counters.prompt_tokens,
            hit_tokens=scheduler.counters.hit_tokens,
            steps=self._steps,
        )

    def _sequence(self, record: Submit) -> Sequence:
        return Sequence(
            record.sequence,
            unpack_tokens(record.prompt),
            unpack_tokens(record.generated),
            record.sampling,
            record.rules,
            record.num_logprobs,
            self._token_bytes,
        )

    def _run(self, works: list[Work]) -> list[Delta]:
        """One forward, and the end of the rounds in it."""
        if not works:
            return []
        logits = self._runner.forward([work.chunk for work in works])
        ending = [work for work in works if work.chunk.num_logits]
        for work in works:
            if not work.chunk.num_logits:
                self.scheduler.advance(work, 0, [])
        if logits is None:
            return []
        outcomes = verify(ending, logits)
        return [self._end_round(w, o) for w, o in zip(ending, outcomes, strict=True)]

    def _end_round(self, work: Work, outcome: Outcome | NonFiniteLogits) -> Delta:
        sequence, cached = work.sequence, work.sequence.num_cached_tokens
        if isinstance(outcome, NonFiniteLogits):
            self.scheduler.cancel(sequence.id)
            return Delta(sequence.id, [], None, cached, finished=True, error=NON_FINITE)
        tokens = self.scheduler.advance(work, outcome.accepted, outcome.tokens)
        logprobs = None if outcome.logprobs is None else outcome.logprobs[: len(tokens)]
        return Delta(sequence.id, tokens, logprobs, cached, sequence.finished)
