"""A sequence at the draft: the round that its target verifies, and the branches for its end."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ssd_draft.planning.grammars import OPENING_SECONDS, PendingGrammar
from ssd_engine.sampling.history import History
from ssd_engine.speculation.frames import (
    Branch,
    Launch,
    Open,
    Outcome,
    Source,
    TargetFrame,
    Verification,
)
from ssd_engine.text.token_ids import unpack_tokens


class DraftRoundPhase(Enum):
    VERIFYING = "verifying"  # the round is being verified: prepare for its outcomes
    DECIDED = "decided"  # its outcome is known, the next launch is not: extend that one path
    CLOSED = "closed"  # holds nothing


class DraftRoundEvent(Enum):
    OUTCOME = "outcome"
    LAUNCH = "launch"
    CLOSE = "close"  # by the target, by eviction, or with the link


TRANSITIONS = {
    (DraftRoundPhase.VERIFYING, DraftRoundEvent.OUTCOME): DraftRoundPhase.DECIDED,
    (DraftRoundPhase.VERIFYING, DraftRoundEvent.CLOSE): DraftRoundPhase.CLOSED,
    (DraftRoundPhase.DECIDED, DraftRoundEvent.LAUNCH): DraftRoundPhase.VERIFYING,
    (DraftRoundPhase.DECIDED, DraftRoundEvent.CLOSE): DraftRoundPhase.CLOSED,
}


def transition(phase: DraftRoundPhase, event: DraftRoundEvent) -> DraftRoundPhase | None:
    """The phase after an event; None when it cannot happen in this phase."""
    return TRANSITIONS.get((phase, event))


@dataclass(slots=True)
class PreparedBranch:
    """The continuation if the round ends in (accepted, token)."""

    accepted: int
    token: int
    tokens: list[int] = field(default_factory=list)
    # Guesses of each token, best first, of a branch that was taken and whose guesses are ranked.
    rankings: list[list[int]] = field(default_factory=list)
    num_pushed: int = 0
    ends_at: int | None = None  # the draft knows no token after so many: the rest fills rows alone

    @property
    def depth(self) -> int:
        return len(self.tokens)

    @property
    def num_useful(self) -> int:
        return len(self.tokens) if self.ends_at is None else self.ends_at

    def extend(self, token: int) -> None:
        """By the next token; it is negative where there is no guess."""
        if token < 0 and self.ends_at is None:
            self.ends_at = len(self.tokens)
        self.tokens.append(max(token, 0))

    def push(self, depth: int) -> Branch | None:
        """The tokens up to ``depth`` that were not pushed yet; None where there are none."""
        start, end = self.num_pushed, min(self.num_useful, depth)
        if start >= end:
            return None
        self.num_pushed = end
        return Branch(self.accepted, self.token, start, self.tokens[start:end])


class DraftSequence:
    def __init__(
        self,
        link: int,
        frame: Open,
        now: float,
        max_depth: int,
        grammar: PendingGrammar | None = None,
    ) -> None:
        """``max_depth`` bounds the branches that this endpoint drafts."""
        self.link = link
        self.id = frame.sequence
        self.round = self.opened_in_round = frame.round
        self.phase = DraftRoundPhase.VERIFYING
        self.prompt = unpack_tokens(frame.prompt)
        self.output = unpack_tokens(frame.output)
        self.speculation = frame.speculation
        self.source = Source.NONE  # where this speculation came from; unknown after an open
        self.sampling = frame.sampling
        self.cache_scope = frame.cache_scope
        self._pending_grammar = grammar
        self.grammar = None if grammar is None else grammar.result(OPENING_SECONDS)
        self.history = self._new_history()
        self.verification = Verification(frame.verification)
        self.down_weight = frame.down_weight
        self.max_tokens = frame.max_tokens
        self._max_depth = max_depth
        self.depth = min(frame.depth, max_depth)  # tokens of a branch that are of use
        self.verify_seconds = frame.verify_micros / 1e6
        self.branches: dict[tuple[int, int], PreparedBranch] = {}
        self.decided: PreparedBranch | None = None  # the outcome's branch, in phase DECIDED
        self.was_prepared = False  # the branch was there before the outcome was known
        self.guesses_known = False  # those after the speculation, as the round begins
        self.opened_at = self.changed_at = self.pushed_at = now
        self.ready = False  # all branches are as long as they are of use
        self.complete = False  # nothing is left to prepare in this phase
        self.waits = False  # it is complete until more is told
        self.tree_counted = False  # the tree of this phase was complete once
        self.was_answered = False  # something was pushed in this phase
        self.plan: Any = None  # this phase's, once it is made
        self.planned_depth = 0  # of the last round's tree
        self.state: Any = None  # the speculator's own

    @property
    def num_committed(self) -> int:
        return len(self.prompt) + len(self.output)

    def apply(self, frame: TargetFrame, now: float) -> bool:
        """Follow the target; False for a frame that does not belong here and now."""
        if isinstance(frame, Outcome):
            return self._end_round(frame, now)
        if isinstance(frame, Launch):
            return self._begin_round(frame, now)
        return False

    def _end_round(self, frame: Outcome, now: float) -> bool:
        after = transition(self.phase, DraftRoundEvent.OUTCOME)
        if after is None or frame.round != self.round or frame.accepted > len(self.speculation):
            return False
        self.phase = after
        self.output += (*self.speculation[: frame.accepted], frame.token)
        outcome = (frame.accepted, frame.token)
        self.was_prepared = outcome in self.branches
        self.decided = self.branches.get(outcome) or PreparedBranch(*outcome)
        self.branches = {outcome: self.decided}
        self._on_round_changed(now)
        return True

    def _begin_round(self, frame: Launch, now: float) -> bool:
        after = transition(self.phase, DraftRoundEvent.LAUNCH)
        if after is None or frame.round != self.round + 1:
            return False
        self.phase = after
        self.round = frame.round
        self.speculation, self.source = frame.speculation, Source(frame.source)
        self.depth = min(frame.depth, self._max_depth)
        self.verify_seconds = frame.verify_micros / 1e6
        self.branches, self.decided = {}, None
        self._on_round_changed(now)
        return True

    def is_late(self, frame: Launch) -> bool:
        """Whether a branch that was prepared came too late to be taken in full."""
        num_taken = len(frame.speculation) if frame.source == Source.CACHE else 0
        # Towards the end less may be wanted.
        return num_taken < min(self.depth, self.planned_depth, frame.depth)

    def _new_history(self) -> History | None:
        return History.of(self.sampling, self.prompt, self.output, self.grammar)

    def _on_round_changed(self, now: float) -> None:
        if self.grammar is None and self._pending_grammar is not None:
            self.grammar = self._pending_grammar.result()
            self.history = self._new_history()
        self.changed_at = self.pushed_at = now
        self.ready = self.complete = self.waits = False
        self.tree_counted = self.was_answered = False
        self.plan = None

    def completes_tree(self) -> bool:
        """Whether all that is of use after this round is there, for the first time."""
        ends = self.ready or (self.complete and not self.waits)
        ready = self.phase is DraftRoundPhase.VERIFYING and ends
        completes, self.tree_counted = ready and not self.tree_counted, ready
        return completes

    def close(self) -> None:
        self.phase = transition(self.phase, DraftRoundEvent.CLOSE) or self.phase

    def pushes(self, now: float) -> list[Branch]:
        """Branches, or parts of them, that were not pushed yet."""
        self.pushed_at, self.was_answered = now, True
        depth = self.useful_depth
        pushed = [branch.push(depth) for branch in self.branches.values()]
        return [branch for branch in pushed if branch is not None]

    @property
    def push_is_due(self) -> bool:
        depth = self.useful_depth
        return any(min(b.num_useful, depth) > b.num_pushed for b in self.branches.values())

    @property
    def useful_depth(self) -> int:
        """How long branches are pushed. A tree goes beyond its plan only for the guesses after its
        branches: without them the next round would begin a forward later."""
        planned = self.phase is DraftRoundPhase.VERIFYING and self.plan is not None
        return min(self.depth, self.plan.depth) if planned else self.depth

    @property
    def is_called_for(self) -> bool:
        """Whether a branch of its tree is what the target asks for next, and the tree began with
        its round: in the first one the prompt comes before it."""
        return (
            self.phase is DraftRoundPhase.DECIDED
            and self.round != self.opened_in_round
            and self.was_prepared
            and self.planned_depth > 0
        )
