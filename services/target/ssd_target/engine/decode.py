"""The decode forward of a step: a round of every running sequence, from its launch to its cost."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ssd_engine.forward.result import ForwardResult, PendingForward
from ssd_engine.tracing.events import Trace, TraceEventKind
from ssd_target.engine.committer import RoundCommitter
from ssd_target.engine.target_runner import TargetRunner
from ssd_target.records.engine_records import Delta
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.verifier import draws
from ssd_target.scheduling.work import StepPlan, Work, extended, following
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation
from ssd_target.speculation.round_metrics import ForwardTiming


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that was launched."""

    works: list[Work]  # those that replay a sequence last
    rows: list[RowSpeculation]  # of the others; one launched ahead has them when it begins
    forward: PendingForward
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A round whose time is not accounted for yet."""

    pending: PendingRound
    scored: ForwardResult
    timing: ForwardTiming
    at: float  # when it ended, by the trace's clock
    deltas: list[Delta]


class DecodeForward:
    def __init__(
        self,
        runner: TargetRunner,
        scheduler: Scheduler,
        speculator: SpeculationCoordinator,
        committer: RoundCommitter,
        trace: Trace,
    ) -> None:
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._committer, self._trace = committer, trace
        self.count, self.seconds, self.gap_seconds = 0, 0.0, 0.0  # since start

    def look_up(self, plan: StepPlan) -> tuple[list[Work], list[RowSpeculation]]:
        """What the next forward computes, and the speculations in it."""
        for work in plan.replay:
            if work.chunk.num_logits:  # its first round here, as a prefill is for others
                self._speculator.begin(work.sequence)
        rows = self._speculator.take([work.sequence for work in plan.decode]) if plan.decode else []
        rounds = [
            extended(work, row.speculation, row.num_certain)
            for work, row in zip(plan.decode, rows, strict=True)
        ]
        return [*rounds, *plan.replay], rows

    def launch(
        self, works: list[Work], rows: list[RowSpeculation], launched: Callable[[], None]
    ) -> PendingRound:
        """``launched`` is called as soon as the device has some work."""
        forward = self._runner.step([work.chunk for work in works], draws(works), launched)
        return PendingRound(works, rows, forward)

    def launch_ahead(self, pending: PendingRound, newcomers: list[Work]) -> PendingRound | None:
        """The round after one that is computed still: its tokens are known to the device alone."""
        works = [
            following(work, -row - 1)
            for work, row in zip(pending.works, pending.forward.rows, strict=True)
            if not work.is_over and not work.sequence.ends_with_next
        ]
        works += newcomers
        return replace(self.launch(works, [], nothing), ahead=True) if works else None

    def begin_ahead(self, ahead: PendingRound) -> PendingRound:
        """What was launched ahead is the round in flight now."""
        alive = [work.sequence for work in ahead.works if not work.is_over]
        rows = self._speculator.take_nothing(alive)
        self._speculator.launch(rows)
        return replace(ahead, rows=rows)

    def finish(self, pending: PendingRound) -> FinishedRound:
        """Verify and commit what was launched; hear what links say as long as it takes."""
        while not pending.forward.done():
            self._speculator.listen()
        scored = pending.forward.result()
        at = self._trace.now()
        for work in pending.works:
            if not work.chunk.num_logits and not work.is_over:
                self._scheduler.advance(work, 0, [])
        ending = [work for work in pending.works if work.chunk.num_logits]
        timing = self._speculator.metrics.measure(pending.rows)
        distributions = self._speculator.distributions.of(pending.rows)
        distributions += [None] * (len(ending) - len(distributions))
        deltas = self._committer.end_rounds(ending, scored, distributions) if ending else []
        if self._speculator.drafts_from_features:
            self._tell_features(pending.works, scored)
        return FinishedRound(pending, scored, timing, at, deltas)

    def tell_features(self, finished: FinishedRound) -> None:
        """To those who do not draft here: once the next forward is launched, as nothing waits for
        it, and before the one after that."""
        if self._speculator.reads_features and not self._speculator.drafts_from_features:
            with self._runner.beside_forwards():
                self._tell_features(finished.pending.works, finished.scored)

    def _tell_features(self, works: list[Work], scored: ForwardResult) -> None:
        """A round that was launched before anyone watched has told none."""
        features = scored.features
        if features is not None:
            self._speculator.tell_features(works, features)

    def account(self, finished: FinishedRound) -> None:
        """What the round took: best read while the next one is computed."""
        pending, timing, seconds = finished.pending, finished.timing, finished.scored.seconds
        self.count += 1
        self.seconds += seconds
        self.gap_seconds += self._runner.gap_seconds
        if self._scheduler.kept is not None:
            self._scheduler.kept.step_seconds.observe(seconds)
        width = sum(len(work.chunk.tokens) for work in pending.works)
        self._trace.span(TraceEventKind.FORWARD, finished.at - seconds, finished.at, rows=width)
        if not pending.rows and not (pending.ahead and timing.width):
            return
        if pending.ahead and pending.rows:  # a prefill may have waited for it before it "began"
            least = max(timing.row_seconds, seconds / len(pending.rows))
            timing = timing._replace(row_seconds=least)
        tokens = {delta.sequence: len(delta.tokens) for delta in finished.deltas}
        committed = [tokens.get(row.state.sequence.id, 0) for row in pending.rows]
        self._speculator.metrics.observe(pending.rows, seconds, committed, timing)


def nothing() -> None:
    """For what has its own time to be said."""
