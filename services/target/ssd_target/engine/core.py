"""The engine: schedule, speculate, run, verify, commit. No gRPC, no tokenizer, no processes.

On a device that computes by itself a round is launched at the end of a step and ended at the
beginning of the next: what a round has to say to others is said while the next one is computed.
Where no sequence speculates, the round after that is launched, too, before its tokens are known:
the device finds them itself, and never waits. A sequence that has ended meanwhile is in it in vain.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from ssd_engine.forward.batch import Draw, Part
from ssd_engine.forward.result import ForwardResult, PendingForward
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.kvcache.swap import Swap
from ssd_engine.text.token_ids import unpack_tokens
from ssd_engine.tracing.events import NoTrace, Trace, TraceEventKind
from ssd_target.records.engine_records import (
    Cancel,
    Delta,
    DraftFrames,
    DraftLinkDown,
    DraftLinkUp,
    EndpointStats,
    GiveBackWaiting,
    LinkGone,
    LinkRecord,
    StepOutput,
    Submit,
    TargetEngineStats,
)
from ssd_target.records.speculation_options import SpeculationRequest
from ssd_target.scheduling.kept_kv import KeptKV, KeptOptions
from ssd_target.scheduling.scheduler import Scheduler, Work
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import (
    DraftDistributions,
    NonFiniteLogits,
    RoundOutcome,
    draws,
    speculation,
    verify,
)
from ssd_target.speculation.coordinator import ForwardTiming, SpeculationCoordinator
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.synthetic import SyntheticAcceptance

log = logging.getLogger(__name__)

FEW_ROWS = 4  # with so few rows, endpoints are told of a step before all of it is launched
QUIET_SECONDS = 10.0  # between two lines of the log about the same
NON_FINITE = "the model gave non-finite logits for this request (weights or dtype overflow)"


class TargetRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def asynchronous(self) -> bool: ...

    @property
    def chains(self) -> bool: ...

    @property
    def gap_seconds(self) -> float: ...

    def forward(self, parts: Tokens[Part], launched: Callable[[], None]) -> Tensor | None: ...

    def draw(self, logits: Tensor | None, draws: Tokens[Draw | None]) -> ForwardResult: ...

    def step(
        self, parts: Tokens[Part], draws: Tokens[Draw | None], launched: Callable[[], None]
    ) -> PendingForward: ...

    def swap(self, swap: Swap) -> None: ...


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that was launched."""

    works: list[Work]
    # One for each work that neither opens nor replays a sequence. A round that was launched ahead
    # gets them when it begins.
    rows: list[RowSpeculation]
    pending: PendingForward
    ahead: bool = False


@dataclass(slots=True)
class FinishedRound:
    """A round whose time is not accounted for yet."""

    flight: PendingRound
    scored: ForwardResult
    measured: ForwardTiming
    at: float  # when it ended, by the trace's clock
    committed: dict[int, int] = field(default_factory=dict)  # tokens, by sequence


class EngineCore:
    def __init__(
        self,
        runner: TargetRunner,
        token_bytes: Tokens[bytes],
        block_size: int,
        max_num_seqs: int,
        prefill_chunk: int,
        speculator: SpeculationCoordinator,
        replay_rows: int = 0,
        trace: Trace | None = None,
        synthetic: SyntheticAcceptance | None = None,
        kept: KeptOptions | None = None,
    ) -> None:
        """``replay_rows``: that of Scheduler. ``synthetic``: decides in the model's place.
        ``kept``: where the KV of sequences that are set aside may go."""
        self._runner = runner
        self._token_bytes = token_bytes
        self._steps = self._forwards = 0
        self._forward_seconds = self._gap_seconds = 0.0
        # By sequence: those that have not begun, or have to begin again.
        self._requests: dict[int, SpeculationRequest] = {}
        self._flight: PendingRound | None = None
        self._ahead: PendingRound | None = None  # launched after the flight, which it follows
        self._ended: FinishedRound | None = None
        self._returned: list[Delta] = []
        self._cancelled: list[int] = []
        self._quiet_until = 0.0
        pool = BlockPool(runner.num_blocks, block_size)
        ahead = 2 * (speculator.depth + 1)  # a round, and what is prepared of the next
        self._kept = None if kept is None else KeptKV(kept, block_size, replay_rows)
        self.scheduler = Scheduler(
            pool, max_num_seqs, prefill_chunk, replay_rows, ahead, self._kept
        )
        self.speculator = speculator
        self._trace = trace or NoTrace()
        self._synthetic = synthetic

    @property
    def has_work(self) -> bool:
        in_flight = self._flight is not None or self._ahead is not None
        return self.scheduler.has_work or in_flight

    def handle(self, record: Submit | Cancel | GiveBackWaiting | LinkRecord) -> None:
        match record:
            case Submit():
                self._requests[record.sequence] = record.speculation
                self.scheduler.add(self._sequence(record))
            case Cancel():
                self.scheduler.cancel(record.sequence)
                self._forget(record.sequence)
                self._cancelled.append(record.sequence)
            case GiveBackWaiting():
                self._give_back()
            case _:
                self.handle_link(record)

    def _give_back(self) -> None:
        for sequence in self.scheduler.give_back():
            self._forget(sequence.id)
            delta = Delta(sequence.id, [], None, 0, finished=True, returned=True)
            self._returned.append(delta)

    def handle_link(self, record: LinkRecord) -> None:
        """Also while a forward is held back for what it says."""
        endpoints = self.speculator.endpoints
        match record:
            case DraftLinkUp():
                endpoints.connected(record)
            case DraftLinkDown():
                endpoints.disconnected(record.link, record.epoch)
            case LinkGone():
                endpoints.gone(record.link)
            case DraftFrames():
                endpoints.follow(record.link, record.epoch, record.frames, record.load)

    def step(self) -> StepOutput:
        deltas, self._returned = self._returned, []
        deltas += self._end_flight()
        plan = self.scheduler.plan()
        self._set_aside(plan.set_aside)
        for swap in plan.swaps:
            self._runner.swap(swap)
        deltas += self._prefill(plan.prefill)
        if self._ahead is None:
            self._launch(plan.decode)
        else:
            self._begin_ahead(self._ahead)
        self._launch_ahead(plan.decode)
        self._account()
        if not self._runner.asynchronous:
            deltas += self._end_flight()
            self._account()
        self.speculator.flush()
        self._steps += 1
        cancelled, self._cancelled = self._cancelled, []
        return StepOutput(deltas, self.stats(), self._trace.take(), cancelled)

    def stats(self) -> TargetEngineStats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return TargetEngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            used_blocks=pool.num_used,
            reserved_blocks=pool.num_reserved,
            cached_blocks=pool.num_cached,
            prompt_tokens=scheduler.counters.prompt_tokens,
            hit_tokens=scheduler.counters.hit_tokens,
            set_aside=scheduler.counters.set_aside,
            replayed_tokens=scheduler.counters.replayed_tokens,
            swapped_out=self._kept.num_kept if self._kept else 0,
            swapped_blocks=self._kept.num_blocks if self._kept else 0,
            steps=self._steps,
            forwards=self._forwards,
            forward_seconds=self._forward_seconds,
            gap_seconds=self._gap_seconds,
            speculation=self.speculator.totals,
            dropped_frames=self.speculator.endpoints.dropped,
            endpoints=[
                EndpointStats(e.link, len(e.sequences), e.payoff.phase.value, e.alpha.value)
                for e in self.speculator.endpoints
            ],
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        if not self._requests.keys() <= self.scheduler.ids:
            raise RuntimeError("engine integrity: a request without a sequence")
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
            record.owner,
            record.scope,
        )

    def _prefill(self, works: list[Work]) -> list[Delta]:
        for work in works:
            if not self.scheduler.replays(work.sequence):
                self._begin(work.sequence)
        if not works:
            return []
        begin, started = self._trace.now(), time.monotonic()
        logits = self._runner.forward([work.chunk for work in works], self.speculator.flush)
        for work in works:
            if not work.chunk.num_logits:
                self.scheduler.advance(work, 0, [])
        ending = [work for work in works if work.chunk.num_logits]
        how = [draw for work in ending for draw in draws(work)]
        deltas = self._end_rounds(ending, self._runner.draw(logits, how)) if ending else []
        width = sum(len(work.chunk.tokens) for work in works)
        self._trace.span(TraceEventKind.PREFILL, begin, self._trace.now(), rows=width)
        if self._kept is not None and ending:  # else nobody has waited for it
            self._kept.prefilled(width, time.monotonic() - started)
        return [delta for delta in deltas if delta is not None]

    def _set_aside(self, sequences: Tokens[Sequence]) -> None:
        """What is in flight for them is in vain: its tokens are drawn again, and are the same."""
        for sequence in sequences:
            if self.speculator.knows(sequence):
                self._requests[sequence.id] = self.speculator.set_aside(sequence)
        if sequences and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            log.info(
                "KV blocks run out: %d sequences were set aside so far, of which the last has %d "
                "tokens; %d run, %d wait",
                self.scheduler.counters.set_aside,
                sequences[-1].num_committed,
                self.scheduler.num_running,
                self.scheduler.num_waiting,
            )

    def _begin(self, sequence: Sequence) -> None:
        request = self._requests.pop(sequence.id, None)
        if request is None:
            return
        if self.speculator.knows(sequence):
            self.speculator.resume(sequence)
        else:
            sequence.begun_at = time.monotonic()
            self.speculator.begin(sequence, request)

    def _launch(self, works: list[Work]) -> None:
        """The round of every running sequence: look up, wait rule, launch."""
        if not works:
            return
        replays = [work for work in works if not work.chunk.num_logits]
        asking = [work for work in works if work.chunk.num_logits]
        # The first round of a sequence that was replayed, as a prefill is for others.
        opening = [work for work in asking if work.sequence.id in self._requests]
        for work in opening:
            self._begin(work.sequence)
        rounds = [work for work in asking if work not in opening] if opening else asking
        rows = self.speculator.take([work.sequence for work in rounds]) if rounds else []
        rounds = [
            self.scheduler.extend(work, row.tokens) for work, row in zip(rounds, rows, strict=True)
        ]
        works = [*rounds, *opening, *replays]
        parts = [work.chunk for work in works]
        how = [draw for work in works for draw in draws(work)]

        if not self._runner.asynchronous:
            self.speculator.launch(rows)
            pending = self._runner.step(parts, how, self.speculator.flush)
        else:  # what can be said while the device works is said then, as soon as it has some work
            few, say = len(rows) <= FEW_ROWS, partial(self._say, rows)
            pending = self._runner.step(parts, how, say if few else _nothing)
            if not few:
                say()
        self._flight = PendingRound(works, rows, pending)

    def _say(self, rows: list[RowSpeculation]) -> None:
        """What endpoints must know of a round that is launched."""
        self.speculator.launch(rows)
        self.speculator.flush()

    def _begin_ahead(self, ahead: PendingRound) -> None:
        """What was launched ahead is the round in flight now."""
        alive = [work.sequence for work in ahead.works if not work.is_over]
        rows = self.speculator.take_nothing(alive)
        self.speculator.launch(rows)
        self._flight, self._ahead = replace(ahead, rows=rows), None

    def _launch_ahead(self, decode: list[Work]) -> None:
        """The round after the one in flight. ``decode``: of all sequences, as they stand."""
        flight = self._flight
        if flight is None or not self._runner.chains or self._synthetic is not None:
            return
        flying = {work.sequence.id for work in flight.works}
        newcomers = [work for work in decode if work.sequence.id not in flying]
        if not all(map(self._is_plain, [*flight.works, *newcomers])):
            return
        works = [
            self.scheduler.follow(work, -row - 1)
            for work, row in zip(flight.works, flight.pending.rows, strict=True)
            if not work.is_over and not work.sequence.ends_with_next
        ]
        works += newcomers
        if works:
            how = [draw for work in works for draw in draws(work)]
            pending = self._runner.step([work.chunk for work in works], how, _nothing)
            self._ahead = PendingRound(works, [], pending, ahead=True)

    def _is_plain(self, work: Work) -> bool:
        """Whether the token after it can be drawn without a word from here."""
        sequence, chunk = work.sequence, work.chunk
        if not chunk.num_logits == len(chunk.tokens) == 1 or sequence.id in self._requests:
            return False
        return work.is_over or self.speculator.is_plain(sequence)

    def _end_flight(self) -> list[Delta]:
        """Verify and commit what was launched; hear what links say as long as it takes."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        while not flight.pending.done():
            self.speculator.listen()
        scored = flight.pending.result()
        at = self._trace.now()
        for work in flight.works:
            if not work.chunk.num_logits and not work.is_over:
                self.scheduler.advance(work, 0, [])
        rounds = [work for work in flight.works if work.chunk.num_logits]
        self._ended = FinishedRound(flight, scored, self.speculator.measure(flight.rows), at)
        if not rounds:
            return []
        drawn = self.speculator.distributions(flight.rows)
        drawn += [None] * (len(rounds) - len(drawn))
        deltas = self._end_rounds(rounds, scored, drawn)
        said = [delta for delta in deltas if delta is not None]
        self._ended.committed.update((delta.sequence, len(delta.tokens)) for delta in said)
        return said

    def _account(self) -> None:
        """What the round that has ended took: read while the next one is computed."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        seconds, rows = ended.scored.seconds, ended.flight.rows
        self._forwards += 1
        self._forward_seconds += seconds
        if self._kept is not None:
            self._kept.stepped(seconds)
        self._gap_seconds += self._runner.gap_seconds
        width = sum(len(work.chunk.tokens) for work in ended.flight.works)
        self._trace.span(TraceEventKind.FORWARD, ended.at - seconds, ended.at, rows=width)
        if rows or (ended.flight.ahead and ended.measured.width):
            committed = [ended.committed.get(row.state.sequence.id, 0) for row in rows]
            measured = ended.measured
            if ended.flight.ahead and rows:  # a prefill may have waited for it before it "began"
                least = max(measured.row_seconds, seconds / len(rows))
                measured = measured._replace(row_seconds=least)
            self.speculator.observe(rows, seconds, committed, measured)

    def _end_rounds(
        self,
        works: list[Work],
        scored: ForwardResult,
        drawn: list[DraftDistributions | None] | None = None,
    ) -> list[Delta | None]:
        """None for a sequence that was cancelled, or set aside, meanwhile."""
        outcomes = verify(works, scored, drawn)
        if self._synthetic is not None:
            outcomes = list(map(self._make_up, works, outcomes))
        return [
            None if work.is_over else self._end_round(work, outcome)
            for work, outcome in zip(works, outcomes, strict=True)
        ]

    def _make_up(
        self, work: Work, outcome: RoundOutcome | NonFiniteLogits
    ) -> RoundOutcome | NonFiniteLogits:
        sequence, tokens = work.sequence, list(speculation(work))
        known = self.speculator.knows(sequence)
        if self._synthetic is None or isinstance(outcome, NonFiniteLogits) or not known:
            return outcome
        foreseen = self.speculator.foreseen(sequence, len(tokens))
        key = (sequence.sampling.seed, sequence.num_committed)
        return self._synthetic(outcome, tokens, foreseen, key)

    def _end_round(self, work: Work, outcome: RoundOutcome | NonFiniteLogits) -> Delta:
        sequence, cached = work.sequence, work.sequence.num_cached_tokens
        if isinstance(outcome, NonFiniteLogits):
            self.scheduler.cancel(sequence.id)
            self._forget(sequence.id)
            return Delta(sequence.id, [], None, cached, finished=True, error=NON_FINITE)
        tokens = self.scheduler.advance(work, outcome.accepted, outcome.tokens)
        source = self.speculator.end_round(
            sequence, outcome.accepted, outcome.tokens[-1], len(tokens)
        )
        logprobs = None if outcome.logprobs is None else outcome.logprobs[: len(tokens)]
        stats = self.speculator.end(sequence.id) if sequence.finished else None
        begun_at, sequence.begun_at = sequence.begun_at, None  # is said once
        return Delta(
            sequence.id,
            tokens,
            logprobs,
            cached,
            sequence.finished,
            speculation=stats,
            source=source,
            accepted=min(outcome.accepted, len(tokens)),
            begun_at=begun_at,
        )

    def _forget(self, sequence_id: int) -> None:
        self._requests.pop(sequence_id, None)
        self.speculator.end(sequence_id)


def _nothing() -> None:
    """For what has its own time to be said."""
