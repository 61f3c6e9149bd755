"""Pushes branches to targets, in pieces that are worth a message."""

from collections.abc import Callable

from ssd_draft.engine.link_sequences import Counters, LinkSequences
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_engine.speculation.frames import Branches
from ssd_engine.tracing.events import Trace, TraceEventKind

ALIVE_SECONDS = 0.25  # without a push, after which an empty one says that work goes on
HOLD_BACK = 0.8  # share of the target's forward: before that only what is ready is pushed
PUSH_SHARE = 0.1  # likewise: pieces are gathered for so long


class BranchPusher:
    def __init__(self, counters: Counters, clock: Callable[[], float], trace: Trace) -> None:
        self._counters, self._now, self._trace = counters, clock, trace

    def push(self, link: LinkSequences) -> None:
        now = self._now()
        for sequence in link.sequences.values():
            due = self._push_pays(sequence, now) and sequence.push_is_due
            if not due and not self._is_silent(sequence, now):
                continue
            branches = sequence.pushes(now)
            self._counters.branches += sum(branch.start == 0 for branch in branches)
            tokens = sum(len(branch.tokens) for branch in branches)
            self._counters.branch_tokens += tokens
            link.outbox.append(Branches(sequence.id, sequence.round, branches))
            self._trace.moment(
                TraceEventKind.PUSH, tokens=tokens, sequence=sequence.id, round=sequence.round
            )

    def _is_silent(self, sequence: DraftSequence, now: float) -> bool:
        """Whether even an empty push is due: an endpoint that never answers is taken for dead."""
        if sequence.complete:
            return not sequence.was_answered
        return now - sequence.pushed_at > ALIVE_SECONDS

    def _push_pays(self, sequence: DraftSequence, now: float) -> bool:
        """A branch that is pushed in pieces costs both sides a message for each: about 1 ms.

        So pieces are gathered until all is ready, or until the target's forward, or its patience
        after that, may come to an end.
        """
        if sequence.ready or sequence.complete:
            return True
        verify = sequence.verify_seconds
        held_share = HOLD_BACK if sequence.phase is DraftRoundPhase.VERIFYING else HOLD_BACK / 2
        held = now - sequence.changed_at < held_share * verify
        return not held and now - sequence.pushed_at >= PUSH_SHARE * verify
