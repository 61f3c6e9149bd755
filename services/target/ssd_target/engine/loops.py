"""The engine's loops: on a device that computes when it is asked to, and on one that computes by
itself."""

from collections.abc import Callable
from functools import partial

from ssd_target.engine.decode import DecodeForward, FinishedRound, PendingRound, nothing
from ssd_target.engine.prefill import PrefillForward
from ssd_target.engine.reread import RereadForward
from ssd_target.records.engine_records import Delta
from ssd_target.scheduling.work import StepPlan, Work
from ssd_target.speculation.coordinator import SpeculationCoordinator
from ssd_target.speculation.endpoints.sequence_speculation import RowSpeculation

FEW_ROWS = 4  # with so few rows, endpoints are told of a step before all of it is launched


class SynchronousLoop:
    """A round begins and ends within a step."""

    def __init__(
        self,
        plan: Callable[[], StepPlan],
        prefill: PrefillForward,
        decode: DecodeForward,
        speculator: SpeculationCoordinator,
        reread: RereadForward,
    ) -> None:
        self._plan, self._prefill, self._decode = plan, prefill, decode
        self._reread = reread
        self._speculator = speculator
        self.pending: PendingRound | None = None  # in flight between two steps

    def step(self) -> list[Delta]:
        plan = self._plan()
        deltas = self._read(plan)
        if not plan.has_round:
            return deltas
        works, rows = self._decode.look_up(plan)
        self._speculator.launch(rows)
        pending = self._decode.launch(works, rows, self._speculator.endpoints.flush)
        finished = self._decode.finish(pending)
        self._decode.tell_features(finished)
        self._decode.account(finished)
        return deltas + finished.deltas

    def _read(self, plan: StepPlan) -> list[Delta]:
        deltas = self._prefill.run(plan.prefill)
        self._reread.run(prompts_first=bool(plan.prefill))
        return deltas


class OverlappedLoop(SynchronousLoop):
    """A round is launched at the end of a step and ended at the beginning of the next: what it has
    to say to others is said while the next one is computed."""

    def step(self) -> list[Delta]:
        finished = None if self.pending is None else self._decode.finish(self.pending)
        plan = self._plan()
        deltas = self._read(plan)
        self.pending = self._launch(plan, finished)
        if finished is None:
            return deltas
        self._decode.account(finished)
        return finished.deltas + deltas

    def _launch(self, plan: StepPlan, finished: FinishedRound | None) -> PendingRound | None:
        """What ``finished`` has told of its rows goes out before more than one round is launched
        after it."""
        pending = self._launch_one(plan)
        if finished is not None:
            self._decode.tell_features(finished)
        return pending

    def _launch_one(self, plan: StepPlan) -> PendingRound | None:
        if not plan.has_round:
            return None
        works, rows = self._decode.look_up(plan)
        tell = partial(self._tell, rows)
        if len(rows) <= FEW_ROWS:
            return self._decode.launch(works, rows, tell)
        pending = self._decode.launch(works, rows, nothing)
        tell()
        return pending

    def _tell(self, rows: list[RowSpeculation]) -> None:
        """Endpoints hear of a round that is launched."""
        self._speculator.launch(rows)
        self._speculator.endpoints.flush()


class ChainedLoop(OverlappedLoop):
    """Where no sequence speculates, the round after the one in flight is launched, too, before its
    tokens are known: the device finds them itself, and never waits. A sequence that has ended
    meanwhile is in it in vain."""

    _ahead: PendingRound | None = None  # only while another one is in flight

    def _launch(self, plan: StepPlan, finished: FinishedRound | None) -> PendingRound | None:
        pending = super()._launch(plan, finished)
        if pending is not None:
            self._ahead = self._launch_ahead(pending, plan)
        return pending

    def _launch_one(self, plan: StepPlan) -> PendingRound | None:
        ahead, self._ahead = self._ahead, None
        return super()._launch_one(plan) if ahead is None else self._decode.begin_ahead(ahead)

    def _launch_ahead(self, pending: PendingRound, plan: StepPlan) -> PendingRound | None:
        in_flight = {work.sequence.id for work in pending.works}
        newcomers = [work for work in plan.decode if work.sequence.id not in in_flight]
        if plan.replay or not all(map(self._is_plain, [*pending.works, *newcomers])):
            return None
        return self._decode.launch_ahead(pending, newcomers)

    def _is_plain(self, work: Work) -> bool:
        """Whether the token after it can be drawn without a word from here."""
        if not work.chunk.num_logits == len(work.chunk.tokens) == 1:
            return False
        if work.sequence.grammar is not None:  # what may follow depends on the token before
            return work.is_over
        return work.is_over or self._speculator.is_plain(work.sequence)
