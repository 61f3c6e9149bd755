"""One sequence's rows in a forward, and how the tokens after them are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_draft.planning.plan import RANKS, RoundPlan
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.sequence import ModelSequence
from ssd_draft.speculators.model.tree import Tree
from ssd_engine.forward.batch import Draw, Part
from ssd_engine.sampling.guesses import sample_row
from ssd_engine.sampling.sampler import SampleRow
from ssd_engine.speculation.frames import Verification


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a sequence whose logits are wanted, one after the other."""

    state: ModelSequence
    part: Part  # the last one that has such rows
    plan: RoundPlan
    begin: int  # row of the first
    num_logits: int

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.num_logits)

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

    def draws(self, ahead: int = 0) -> Sequence[Draw]:
        """How the device ranks its rows, or those of so many forwards ``ahead``."""
        sequence, drafting = self.state.sequence, self.state.drafting
        committed = sequence.num_committed
        if drafting is None:
            return [self._draw(committed + i, i) for i in range(self.num_logits)]
        depth = drafting.depth + ahead
        if isinstance(drafting, DecidedBranch):
            # What is not known here is the row's own token, the last one.
            return [self._draw(committed + depth, ahead, drafting.branches[0].tokens, depth)]
        if sequence.history is None:
            first = self._draw(committed + depth + 1, 1, (), depth)
            after = [first.moved(accepted) for accepted in range(len(sequence.speculation) + 1)]
            return [after[branch.accepted] for branch in drafting.branches]
        chain, draws = sequence.speculation, []
        for branch in drafting.branches:
            path = [*chain[: branch.accepted], branch.token, *branch.tokens]
            # The row's own token is the last one, or the one after that, which is not known here.
            known, position = path if ahead else path[:-1], committed + len(path) + ahead
            draws.append(self._draw(position, 1, known, depth))
        return draws

    def _draw(
        self, position: int, recent: int, path: Sequence[int] = (), place: int | None = None
    ) -> Draw:
        """``place`` of the token in its speculation; None where it is ranked, and not drawn."""
        sequence = self.state.sequence
        path = () if sequence.history is None else tuple(path)
        draw = Draw.of(sequence.sampling, position, sequence.history, recent, path)
        if self.coupled:
            return draw
        # The token is verified at that place: there so many outcomes are prepared for.
        width = 0 if place is None else self.plan.width(place)
        return draw._replace(width=width, down_weight=sequence.down_weight)

    def sample_rows(self) -> list[SampleRow]:
        """One for each row: what lies before the token, where the host draws it from logits."""
        sequence, drafting = self.state.sequence, self.state.drafting
        chain = sequence.speculation
        tails: Sequence[Sequence[int]]
        if drafting is None:
            tails = [chain[:i] for i in range(self.num_logits)]
        elif isinstance(drafting, DecidedBranch):
            tails = [drafting.branches[0].tokens]
        else:
            tails = [
                (*chain[: each.accepted], each.token, *each.tokens) for each in drafting.branches
            ]
        about = (sequence.sampling, sequence.prompt, sequence.output)
        return [sample_row(*about, tail, sequence.grammar) for tail in tails]
