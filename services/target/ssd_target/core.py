"""The engine: schedule, speculate, run, verify, commit. No gRPC, no tokenizer, no processes."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Protocol

from torch import Tensor

from ssd_engine.batch import Part
from ssd_engine.block_pool import BlockPool
from ssd_engine.token_ids import unpack_tokens
from ssd_target.records import (
    Cancel,
    Delta,
    EndpointStats,
    LinkDown,
    LinkFrames,
    LinkGone,
    LinkRecord,
    LinkUp,
    Stats,
    StepOutput,
    Submit,
)
from ssd_target.scheduler import Scheduler, Work
from ssd_target.sequence import Sequence
from ssd_target.speculation.options import SpeculationRequest
from ssd_target.speculation.speculated import Taken
from ssd_target.speculation.speculator import Speculator
from ssd_target.verifier import NonFiniteLogits, Outcome, verify

NON_FINITE = "the model gave non-finite logits for this request (weights or dtype overflow)"


class Runner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    def forward(self, parts: Tokens[Part], launched: Callable[[], None]) -> Tensor | None: ...


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        token_bytes: Tokens[bytes],
        block_size: int,
        max_num_seqs: int,
        prefill_chunk: int,
        speculator: Speculator,
    ) -> None:
        self._runner = runner
        self._token_bytes = token_bytes
        self._steps = 0
        self._requests: dict[int, SpeculationRequest] = {}  # of sequences not yet begun
        pool = BlockPool(runner.num_blocks, block_size)
        self.scheduler = Scheduler(pool, max_num_seqs, prefill_chunk)
        self.speculator = speculator

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def handle(self, record: Submit | Cancel | LinkRecord) -> None:
        match record:
            case Submit():
                self._requests[record.sequence] = record.speculation
                self.scheduler.add(self._sequence(record))
            case Cancel():
                self.scheduler.cancel(record.sequence)
                self._forget(record.sequence)
            case _:
                self.handle_link(record)

    def handle_link(self, record: LinkRecord) -> None:
        """Also while a forward is held back for what it says."""
        endpoints = self.speculator.endpoints
        match record:
            case LinkUp():
                endpoints.connected(record)
            case LinkDown():
                endpoints.disconnected(record.link, record.epoch)
            case LinkGone():
                endpoints.gone(record.link)
            case LinkFrames():
                endpoints.follow(record.link, record.epoch, record.frames, record.load)

    def step(self) -> StepOutput:
        plan = self.scheduler.plan()
        deltas = self._prefill(plan.prefill) + self._decode(plan.decode)
        self.speculator.flush()
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
            speculation=self.speculator.totals,
            dropped_frames=self.speculator.endpoints.dropped,
            endpoints=[
                EndpointStats(e.link, len(e.sequences), e.payoff.phase.value, e.alpha.value)
                for e in self.speculator.endpoints
            ],
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.speculator.check_integrity()

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

    def _prefill(self, works: list[Work]) -> list[Delta]:
        for work in works:
            request = self._requests.pop(work.sequence.id, None)
            if request is not None:
                self.speculator.begin(work.sequence, request)
        return self._run(works)

    def _decode(self, works: list[Work]) -> list[Delta]:
        """The round of every running sequence: look up, wait rule, launch, verify, commit."""
        if not works:
            return []
        rows = self.speculator.take([work.sequence for work in works])
        works = [
            self.scheduler.extend(work, row.tokens) for work, row in zip(works, rows, strict=True)
        ]
        self.speculator.launch(rows)
        begin = time.monotonic()
        deltas = self._run(works, rows)
        seconds = time.monotonic() - begin
        self.speculator.stepped(rows, seconds, [len(delta.tokens) for delta in deltas])
        return deltas

    def _run(self, works: list[Work], rows: list[Taken] | None = None) -> list[Delta]:
        """One forward, and the end of the rounds in it."""
        if not works:
            return []
        logits = self._runner.forward([work.chunk for work in works], self.speculator.flush)
        ending = [work for work in works if work.chunk.num_logits]
        for work in works:
            if not work.chunk.num_logits:
                self.scheduler.advance(work, 0, [])
        if logits is None:
            return []
        drawn = None if rows is None else self.speculator.drawn(rows)
        outcomes = verify(ending, logits, drawn)
        return [self._end_round(w, o) for w, o in zip(ending, outcomes, strict=True)]

    def _end_round(self, work: Work, outcome: Outcome | NonFiniteLogits) -> Delta:
        sequence, cached = work.sequence, work.sequence.num_cached_tokens
        if isinstance(outcome, NonFiniteLogits):
            self.scheduler.cancel(sequence.id)
            self._forget(sequence.id)
            return Delta(sequence.id, [], None, cached, finished=True, error=NON_FINITE)
        tokens = self.scheduler.advance(work, outcome.accepted, outcome.tokens)
        self.speculator.ended(sequence, outcome.accepted, outcome.tokens[-1], len(tokens))
        logprobs = None if outcome.logprobs is None else outcome.logprobs[: len(tokens)]
        stats = self.speculator.end(sequence.id) if sequence.finished else None
        return Delta(sequence.id, tokens, logprobs, cached, sequence.finished, speculation=stats)

    def _forget(self, sequence_id: int) -> None:
        self._requests.pop(sequence_id, None)
        self.speculator.end(sequence_id)
