"""The end of rounds: verify, commit, and say what was committed."""

from collections.abc import Sequence as Rows

from ssd_engine.forward.result import ForwardResult
from ssd_target.records.engine_records import Delta, failed
from ssd_target.scheduling.scheduler import Scheduler
from ssd_target.scheduling.sequence import Sequence
from ssd_target.scheduling.verifier import (
    NON_FINITE,
    DraftDistributions,
    NothingDrawn,
    RoundOutcome,
    Verifier,
)
from ssd_target.scheduling.work import Work
from ssd_target.speculation.coordinator import SpeculationCoordinator


class RoundCommitter:
    def __init__(
        self, scheduler: Scheduler, speculator: SpeculationCoordinator, verify: Verifier
    ) -> None:
        self._scheduler, self._speculator, self._verify = scheduler, speculator, verify

    def end_rounds(
        self,
        works: Rows[Work],
        scored: ForwardResult,
        distributions: Rows[DraftDistributions | None] = (),
    ) -> list[Delta]:
        """Nothing is said of a sequence that was cancelled, or set aside, meanwhile."""
        outcomes = self._verify(works, scored, distributions)
        return [
            self._end_round(work, outcome)
            for work, outcome in zip(works, outcomes, strict=True)
            if not work.is_over
        ]

    def fail(self, sequence: Sequence, why: NothingDrawn = NON_FINITE) -> Delta:
        """Ends a sequence for which nothing can be drawn."""
        self._scheduler.cancel(sequence.id)
        self._speculator.end(sequence.id)
        return failed(sequence.id, why.problem, why.field, sequence.num_cached_tokens)

    def _end_round(self, work: Work, outcome: RoundOutcome | NothingDrawn) -> Delta:
        sequence, cached = work.sequence, work.sequence.num_cached_tokens
        if isinstance(outcome, NothingDrawn):
            return self.fail(sequence, outcome)
        tokens = self._scheduler.advance(work, outcome.accepted, outcome.tokens)
        source = self._speculator.end_round(sequence, outcome, len(tokens))
        begun_at, sequence.begun_at = sequence.begun_at, None  # is said once
        return Delta(
            sequence.id,
            tokens,
            None if outcome.logprobs is None else outcome.logprobs[: len(tokens)],
            cached,
            sequence.finished,
            speculation=self._speculator.end(sequence.id) if sequence.finished else None,
            source=source,
            accepted=min(outcome.accepted, len(tokens)),
            begun_at=begun_at,
        )
