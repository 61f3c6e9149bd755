"""The engine: schedule, speculate, run, verify, commit. No gRPC, no tokenizer, no processes."""

import logging
import time
from collections.abc import Sequence as Tokens

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.kvcache.block_pool import BlockPool
from ssd_engine.text.token_ids import unpack_tokens
from ssd_engine.tracing.events import NoTrace, Trace
from ssd_serving.engine.records import LinkGone
from ssd_target.engine.committer import RoundCommitter
from ssd_target.engine.decode import DecodeForward
from ssd_target.engine.feature_watch import FeatureWatch
from ssd_target.engine.grammar_admission import GrammarAdmission
from ssd_target.engine.loops import ChainedLoop, OverlappedLoop, SynchronousLoop
from ssd_target.engine.prefill import PrefillForward
from ssd_target.engine.reread import RereadForward
from ssd_target.engine.synthetic_verifier import SyntheticVerifier
from ssd_target.engine.target_runner import TargetRunner
from ssd_target.records.engine_records import (
    Cancel,
    Delta,
    DraftFrames,
    DraftLinkDown,
    DraftLinkUp,
    EndpointStats,
    GiveBackWaiting,
    LinkRecord,
    StepOutput,
    Submit,
    TargetEngineStats,
    failed,
)
from ssd_target.scheduling.kept_kv import KeptKV, KeptOptions
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import Verifier, verify
from ssd_target.scheduling.work import StepPlan
from ssd_target.speculation.coordinator import SpeculationCoordinator

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0  # between two lines of the log about the same


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
        verify: Verifier = verify,
        kept: KeptOptions | None = None,
        spelled_bytes: Tokens[bytes] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """``replay_rows``: that of Scheduler. ``kept``: where the KV of sequences that are set
        aside may go. ``spelled_bytes``: ``token_bytes`` with control tokens spelled out."""
        self._runner = runner
        self._token_bytes = token_bytes
        self._spelled_bytes = token_bytes if spelled_bytes is None else spelled_bytes
        self._trace = trace or NoTrace()
        self._compiling = GrammarAdmission(grammars)
        self._returned: list[Delta] = []
        self._cancelled: list[int] = []
        self._steps = 0
        self._quiet_until = 0.0
        self.speculator = speculator
        self.scheduler = Scheduler(
            BlockPool(runner.num_blocks, block_size),
            max_num_seqs,
            prefill_chunk,
            replay_rows,
            2 * (speculator.depth + 1),  # a round, and what is prepared of the next
            None if kept is None else KeptKV(kept, block_size, replay_rows),
        )
        speculator.feed.follow_pool(self.scheduler.pool)
        self._watch = FeatureWatch(runner, speculator)
        self._watch.catch_up()
        committer = RoundCommitter(self.scheduler, speculator, verify)
        parts = (runner, self.scheduler, speculator, committer, self._trace)
        self._decode = DecodeForward(*parts)
        # What a synthetic verifier commits is not what the device has drawn, and would go on with.
        chains = runner.chains and not isinstance(verify, SyntheticVerifier)
        overlapped = ChainedLoop if chains else OverlappedLoop
        loop = overlapped if runner.asynchronous else SynchronousLoop
        reread = RereadForward(runner, self.scheduler, speculator, prefill_chunk, self._trace)
        prefill = PrefillForward(*parts)
        self._loop = loop(self._plan, prefill, self._decode, speculator, reread)

    @property
    def has_work(self) -> bool:
        return self._has_rounds or len(self._compiling) > 0 or self._watch.is_behind

    @property
    def _has_rounds(self) -> bool:
        return self.scheduler.has_work or self._loop.pending is not None

    def handle(self, record: Submit | Cancel | GiveBackWaiting | LinkRecord) -> None:
        match record:
            case Submit() if record.sampling.grammar is not None:
                self._compiling.add(record)
            case Submit():
                self.scheduler.add(self._sequence(record))
            case Cancel():
                self._compiling.cancel(record.sequence)
                self.scheduler.cancel(record.sequence)
                self.speculator.end(record.sequence)
                self._cancelled.append(record.sequence)
            case GiveBackWaiting():
                self._give_back()
            case _:
                self.handle_link(record)

    def _admit_compiled(self) -> None:
        for record, compiled in self._compiling.take(idle=not self._has_rounds):
            if isinstance(compiled, InputError):
                delta = failed(record.sequence, compiled.problem, compiled.field)
                self._returned.append(delta)
            else:
                self.scheduler.add(self._sequence(record, compiled))

    def _sequence(self, record: Submit, grammar: GrammarFollower | None = None) -> Sequence:
        return Sequence(
            record.sequence,
            unpack_tokens(record.prompt),
            unpack_tokens(record.generated),
            record.sampling,
            record.rules,
            record.num_logprobs,
            self._spelled_bytes if record.rules.special_tokens else self._token_bytes,
            record.owner,
            record.scope,
            record.speculation,
            record.prompt_logprobs,
            grammar,
        )

    def _give_back(self) -> None:
        numbers = [record.sequence for record in self._compiling.take_all()]
        for sequence in self.scheduler.give_back():
            self.speculator.end(sequence.id)
            numbers.append(sequence.id)
        self._returned += [Delta(i, [], None, 0, finished=True, returned=True) for i in numbers]

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
        if self._compiling:
            self._admit_compiled()
        self._watch.follow()
        deltas, self._returned = self._returned, []
        deltas += self._loop.step()
        self.speculator.endpoints.flush()
        self._steps += 1
        cancelled, self._cancelled = self._cancelled, []
        return StepOutput(deltas, self.stats(), self._trace.take(), cancelled)

    def _plan(self) -> StepPlan:
        """What the next forwards compute; who has to give up its blocks for it does so first."""
        plan = self.scheduler.plan()
        for sequence in plan.set_aside:
            self.speculator.set_aside(sequence)
        if plan.set_aside:
            self._log_set_aside(plan.set_aside[-1])
        for swap in plan.swaps:
            self._runner.swap(swap)
        return plan

    def _log_set_aside(self, last: Sequence) -> None:
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        log.info(
            "KV blocks run out: %d sequences were set aside so far, of which the last has %d "
            "tokens; %d run, %d wait",
            self.scheduler.counters.set_aside,
            last.num_committed,
            self.scheduler.num_running,
            self.scheduler.num_waiting,
        )

    def stats(self) -> TargetEngineStats:
        scheduler, pool, kept = self.scheduler, self.scheduler.pool, self.scheduler.kept
        feed = self.speculator.feed
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
            swapped_out=kept.num_kept if kept else 0,
            swapped_blocks=kept.num_blocks if kept else 0,
            steps=self._steps,
            forwards=self._decode.count,
            forward_seconds=self._decode.seconds,
            gap_seconds=self._decode.gap_seconds,
            speculation=self.speculator.totals,
            dropped_frames=self.speculator.endpoints.dropped,
            endpoints=[
                EndpointStats(
                    e.link, len(e.sequences), e.payoff.phase.value, e.alpha.value, e.reports()
                )
                for e in self.speculator.endpoints
            ],
            feature_rows=feed.counters.rows,
            feature_bytes=feed.counters.bytes,
            missed_features=feed.counters.missed,
            reread_features=feed.counters.reread,
            feature_requests=feed.counters.requests,
            refused_feature_requests=feed.counters.refused,
            kept_feature_bytes=feed.kept.num_bytes,
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.speculator.check_integrity()
