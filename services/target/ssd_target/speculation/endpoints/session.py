"""A sequence and its endpoint, round by round: the target's side of the protocol. Pure Python.

An endpoint holds a sequence from an open on, which is sent when a round is launched. Then outcome
and launch follow each other. Whatever goes wrong leads to *detached*, where the sequence goes on
without; the next launch may open it again, there or elsewhere.
"""

from enum import Enum

from ssd_engine.speculation.frames import Branches
from ssd_target.records.speculation_stats import LookUp
from ssd_target.speculation.endpoints.branches import BranchStore


class RoundState(Enum):
    DETACHED = "detached"  # no endpoint holds the sequence
    VERIFYING = "verifying"  # the endpoint prepares for the outcomes of the round
    DECIDED = "decided"  # the outcome is known, the next round is not launched

    __hash__ = object.__hash__  # in C: transitions are looked up in every round


class RoundEvent(Enum):
    OPEN = "open"
    OUTCOME = "outcome"
    LAUNCH = "launch"
    DETACH = "detach"  # lost, refused, moved, or left because it does not pay

    __hash__ = object.__hash__


TRANSITIONS = {
    (RoundState.DETACHED, RoundEvent.OPEN): RoundState.VERIFYING,
    (RoundState.DETACHED, RoundEvent.OUTCOME): RoundState.DETACHED,
    (RoundState.DETACHED, RoundEvent.LAUNCH): RoundState.DETACHED,
    (RoundState.DETACHED, RoundEvent.DETACH): RoundState.DETACHED,
    (RoundState.VERIFYING, RoundEvent.OUTCOME): RoundState.DECIDED,
    (RoundState.VERIFYING, RoundEvent.DETACH): RoundState.DETACHED,
    (RoundState.DECIDED, RoundEvent.LAUNCH): RoundState.VERIFYING,
    (RoundState.DECIDED, RoundEvent.DETACH): RoundState.DETACHED,
}


def transition(state: RoundState, event: RoundEvent) -> RoundState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a {state.value} sequence cannot {event.value}") from None


class EndpointSession:
    """One sequence's session. Round 0 is the prefill; ``round`` counts without an endpoint, too."""

    def __init__(self, vocab_size: int, max_depth: int) -> None:
        self._vocab_size, self._max_depth = vocab_size, max_depth
        self.state = RoundState.DETACHED
        self.round = -1  # not launched
        self.link = self.epoch = -1  # those of the endpoint, while attached
        self.decided: tuple[int, int] | None = None  # the outcome, until the next launch
        self.branches = BranchStore(0, 0, 0)
        self.stale = False  # branches of what is over were pushed in this round

    @property
    def attached(self) -> bool:
        return self.state is not RoundState.DETACHED

    def launch(self, length: int) -> None:
        """A round with a speculation of this length begins."""
        self.state = transition(self.state, RoundEvent.LAUNCH)
        self._begin(length)

    def launch_open(self, length: int, link: int, epoch: int) -> None:
        """The same, and an endpoint is told of the sequence as it stands."""
        self.state = transition(self.state, RoundEvent.OPEN)
        self.link, self.epoch = link, epoch
        self._begin(length)

    def _begin(self, length: int) -> None:
        self.round += 1
        self.decided = None
        self.stale = False
        self.branches = BranchStore(length, self._max_depth, self._vocab_size)

    def outcome(self, accepted: int, token: int) -> None:
        self.state = transition(self.state, RoundEvent.OUTCOME)
        self.decided = (accepted, token)

    def detach(self) -> None:
        self.state = transition(self.state, RoundEvent.DETACH)
        self.link = self.epoch = -1
        self.branches = BranchStore(0, 0, 0)

    def push(self, link: int, epoch: int, frame: Branches) -> int:
        """Take branches in; returns how many pieces were dropped.

        Branches are named by their round: those of another one are stale, whatever they say.
        """
        fits = self.attached and (self.link, self.epoch) == (link, epoch)
        if not fits or frame.round != self.round:
            self.stale |= bool(frame.branches) and (not fits or frame.round < self.round)
            return len(frame.branches)
        return sum(not self.branches.add(branch) for branch in frame.branches)

    def look_up(self, accepted: int, token: int, wanted: int) -> LookUp:
        found = self.branches.look_up(accepted, token, wanted)
        only_stale = self.stale and not len(self.branches)
        return LookUp.STALE if found is LookUp.LATE and only_stale else found
