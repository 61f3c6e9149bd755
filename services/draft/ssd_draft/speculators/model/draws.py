"""How the tokens after a forward's rows are drawn: by the device, or on the host from logits."""

from collections.abc import Sequence

from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.row_group import RowGroup
from ssd_engine.forward.batch import Draw
from ssd_engine.sampling.guesses import sample_row
from ssd_engine.sampling.sampler import SampleRow


def draws_of(group: RowGroup, ahead: int = 0) -> Sequence[Draw]:
    """How the device ranks a sequence's rows."""
    sequence, drafting = group.state.sequence, group.state.drafting
    committed = sequence.num_committed
    if drafting is None:
        return [_draw(group, committed + i, i) for i in range(group.part.num_logits)]
    depth = drafting.depth + ahead
    if isinstance(drafting, DecidedBranch):
        # What is not known here is the row's own token, the last one.
        return [_draw(group, committed + depth, ahead, drafting.branches[0].tokens, depth)]
    if sequence.history is None:
        first = _draw(group, committed + depth + 1, 1, (), depth)
        after = [first.moved(accepted) for accepted in range(len(sequence.speculation) + 1)]
        return [after[branch.accepted] for branch in drafting.branches]
    chain, draws = sequence.speculation, []
    for branch in drafting.branches:
        path = [*chain[: branch.accepted], branch.token, *branch.tokens]
        # The row's own token is the last one, or the one after that, which is not known here.
        known, position = path if ahead else path[:-1], committed + len(path) + ahead
        draws.append(_draw(group, position, 1, known, depth))
    return draws


def _draw(
    group: RowGroup, position: int, recent: int, path: Sequence[int] = (), place: int | None = None
) -> Draw:
    """``place`` of the token in its speculation; None where it is ranked, and not drawn."""
    sequence = group.state.sequence
    path = () if sequence.history is None else tuple(path)
    draw = Draw.of(sequence.sampling, position, sequence.history, recent, path)
    if group.coupled:
        return draw
    # The token is verified at that place: there so many outcomes are prepared for.
    width = 0 if place is None else group.plan.width(place)
    return draw._replace(width=width, down_weight=sequence.down_weight)


def sample_rows(groups: Sequence[RowGroup]) -> list[SampleRow]:
    """One for each row of logits: what lies before the token that the host draws."""
    return [row for group in groups for row in _sample_rows(group)]


def _sample_rows(group: RowGroup) -> list[SampleRow]:
    sequence, drafting = group.state.sequence, group.state.drafting
    prompt, output, params = sequence.prompt, sequence.output, sequence.sampling
    chain = sequence.speculation
    if drafting is None:
        count = group.part.num_logits
        return [sample_row(params, prompt, output, chain[:i]) for i in range(count)]
    if isinstance(drafting, DecidedBranch):
        return [sample_row(params, prompt, output, drafting.branches[0].tokens)]
    return [
        sample_row(params, prompt, output, (*chain[: each.accepted], each.token, *each.tokens))
        for each in drafting.branches
    ]
