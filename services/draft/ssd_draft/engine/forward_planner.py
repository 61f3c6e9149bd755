"""Chooses the sequences of the next forward: links take turns, and share its rows."""

from collections.abc import Callable, Mapping

from ssd_draft.engine.fair_scheduler import FairScheduler
from ssd_draft.engine.link_sequences import LinkSequences
from ssd_draft.planning.sequence import DraftRoundPhase, DraftSequence
from ssd_draft.speculators.base import Speculator
from ssd_engine.speculation.latency_model import StepClock


class ForwardPlanner:
    def __init__(
        self,
        speculator: Speculator,
        links: Mapping[int, LinkSequences],
        max_rows: int,
        prefill_chunk: int,
        step_clock: StepClock,
        clock: Callable[[], float],
    ) -> None:
        self._speculator, self._links, self._now = speculator, links, clock
        # A long prompt leaves room for others, and never overflows a forward.
        self._chunk = max(1, min(prefill_chunk, max_rows // 2))
        self._scheduler = FairScheduler(max_rows, step_clock)

    def choose(self) -> tuple[dict[DraftSequence, int], int]:
        """Sequences of the next forward, with their rows, and the longest piece of a prompt in it.

        Links that share it get equal parts of its rows. Of a link, what its target waits for comes
        first, then what has waited longest. The very first may be larger than its part.
        """
        links = {link.account: link for link in self._links.values()}
        active = [account for account, link in links.items() if link.is_active]
        turn = self._scheduler.turn(links, active, self._now())
        chunk = max(1, min(self._chunk, turn.max_rows // 2))
        chosen: dict[DraftSequence, int] = {}
        left = turn.max_rows
        part = turn.max_rows // max(1, len(turn.sharing))
        for account in turn.sharing:
            left -= self._fill(chosen, links[account], part, chunk)
        for account in turn.sharing:  # what others left of their parts
            left -= self._fill(chosen, links[account], left, chunk)
        if turn.sharing and turn.joining:
            left = min(left, self._scheduler.rows_to_join(turn.max_rows - left))
        for account in turn.joining:
            left -= self._fill(chosen, links[account], left, chunk)
        return chosen, chunk

    def _fill(
        self, chosen: dict[DraftSequence, int], link: LinkSequences, room: int, chunk: int
    ) -> int:
        """Adds sequences of a link; returns their rows."""
        added = 0
        for sequence in _by_urgency(link):
            if sequence in chosen:
                continue
            rows = self._speculator.rows(sequence, chunk)
            if added + rows <= room or not chosen:
                chosen[sequence] = rows
                added += rows
        link.account.served += added
        return added


def _by_urgency(link: LinkSequences) -> list[DraftSequence]:
    """Sequences with something to do, most urgent first."""
    return sorted(
        (sequence for sequence in link.sequences.values() if not sequence.complete),
        key=lambda s: (s.phase is not DraftRoundPhase.DECIDED, s.changed_at),
    )
