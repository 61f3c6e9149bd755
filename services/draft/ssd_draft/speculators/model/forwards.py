"""Launches the draft model's forwards: for what sequences need next, and one depth ahead of that.

Where the device chooses the tokens after its rows, the next depth is launched before this one is
looked at: its tokens are known to the device alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_draft.planning.plan import RoundPlan
from ssd_draft.planning.sequence import DraftSequence
from ssd_draft.speculators.base import DraftRunner
from ssd_draft.speculators.model.decided_branch import DecidedBranch
from ssd_draft.speculators.model.kv_room import LOOK_AHEAD
from ssd_draft.speculators.model.row_group import RowGroup
from ssd_draft.speculators.model.tree import Tree
from ssd_engine.forward.batch import Chunk, Part
from ssd_engine.forward.result import PendingForward


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    parts: list[Part]
    groups: list[RowGroup]
    pending: PendingForward
    # What it extends, and from which depth on, if it is ahead.
    extends: list[tuple[Tree | DecidedBranch, int]] = field(default_factory=list)

    def is_next(self, sequences: Sequence[DraftSequence]) -> bool:
        """Whether it was launched ahead for these sequences, and nothing has come between."""
        if len(sequences) != len(self.groups):
            return False
        return all(
            sequence.state is group.state
            and group.state.drafting is drafting
            and drafting.depth == depth
            for sequence, group, (drafting, depth) in zip(
                sequences, self.groups, self.extends, strict=True
            )
        )

    def mark_written(self) -> None:
        """The tokens are known now whose KV this forward writes, before anybody asks for it."""
        for drafting, _ in self.extends:
            if isinstance(drafting, DecidedBranch):
                drafting.mark_written()


def launch(
    runner: DraftRunner,
    sequences: Sequence[DraftSequence],
    limit: int,
    plans: Sequence[RoundPlan],
) -> LaunchedForward | None:
    """The next forward of these sequences; None where there is nothing to compute."""
    parts: list[Part] = []
    groups: list[RowGroup] = []
    begin = 0
    for sequence, plan in zip(sequences, plans, strict=True):
        own = sequence.state.next_parts(limit, plan)
        parts += own
        for part in own:
            if isinstance(part, Chunk):
                sequence.state.path.wrote(part)  # it will be, before anybody asks
        if asking := [part for part in own if part.num_logits]:
            rows = sum(part.num_logits for part in asking)
            groups.append(RowGroup(sequence.state, asking[-1], plan, begin, rows))
            begin += rows
    if not parts:
        return None
    draws = [draw for group in groups for draw in group.draws()]
    return LaunchedForward(parts, groups, runner.step(parts, draws))


def launch_ahead(runner: DraftRunner, forward: LaunchedForward) -> LaunchedForward | None:
    """The depth after the one in flight; None where nothing goes on, or a token must be read."""
    going_on = [group for group in forward.groups if _goes_on(group)]
    if not going_on or not all(group.chosen_by_device for group in forward.groups):
        return None
    if len(going_on) == len(forward.parts) and (deeper := _deepen(runner, forward)) is not None:
        return deeper
    groups: list[RowGroup] = []
    begin = 0
    for group in going_on:
        rows = forward.pending.rows[group.rows]
        part = group.drafting.rows_ahead([-row - 1 for row in rows])
        groups.append(RowGroup(group.state, part, group.plan, begin, part.num_logits))
        begin += part.num_logits
    parts: list[Part] = [group.part for group in groups]
    draws = [draw for group in groups for draw in group.draws(ahead=1)]
    return LaunchedForward(parts, groups, runner.step(parts, draws), _extended_by(groups))


def _deepen(runner: DraftRunner, forward: LaunchedForward) -> LaunchedForward | None:
    """Where every row in flight goes on, the device needs to be told very little."""
    if not forward.extends and any(isinstance(group.part, Chunk) for group in forward.groups):
        return None  # its last token is committed, or was said: only later ones are guesses
    slots = [slot for group in forward.groups for slot in group.drafting.slots_ahead()]
    widths: list[int] = []
    for group in forward.groups:
        width = -1 if group.coupled else group.plan.width(group.drafting.depth + 1)
        widths += [width] * group.num_logits
    pending = runner.deepen(forward.pending, slots, widths)
    if pending is None:
        return None
    return LaunchedForward(forward.parts, forward.groups, pending, _extended_by(forward.groups))


def _extended_by(groups: Sequence[RowGroup]) -> list[tuple[Tree | DecidedBranch, int]]:
    """What a forward extends that is launched while another one is in flight."""
    return [(group.drafting, group.drafting.depth + 1) for group in groups]


def _goes_on(group: RowGroup) -> bool:
    """Whether what it extends gets another token after the one in flight."""
    drafting = group.state.drafting
    if drafting is None or drafting.depth + 1 >= group.plan.depth + LOOK_AHEAD:
        return False
    return drafting.has_room(ahead=1)
