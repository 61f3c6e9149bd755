"""One sequence's rows in a forward."""

from dataclasses import dataclass

from ssd_draft.planning.plan import RANKS, RoundPlan
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_draft.speculators.model.tree import Tree
from ssd_engine.forward.batch import Part
from ssd_engine.speculation.frames import Verification


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a sequence whose logits are wanted."""

    state: ModelSequence
    part: Part
    plan: RoundPlan
    begin: int  # row of the first

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.part.num_logits)

    @property
    def is_chain(self) -> bool:
        """Whether its rows are the chain's, after which branches start."""
        return self.state.drafting is None

    @property
    def chosen_by_device(self) -> bool:
        """Whether the tokens after its rows are those that the device chooses."""
        return not self.is_chain and self.plan.ranks <= RANKS + 1

    @property
    def coupled(self) -> bool:
        return self.state.sequence.verification is Verification.COUPLED

    @property
    def drafting(self) -> Tree | DecidedBranch:
        """What its rows extend, a token for each branch."""
        if self.state.drafting is None:
            raise RuntimeError("the rows of a chain extend no branch")
        return self.state.drafting
