"""Whose turn it is: between identities, and between the prompts of each of them. Pure Python.

Identities take turns by what they were given of late, so that whoever sends many or long prompts
holds up nobody but themselves. Of the prompts of one identity the one with least left to compute
comes first, which lets short ones pass and goes on with what was begun; but now and then the oldest
is first, so that none waits for ever.
"""

from collections.abc import Callable, Collection, Sequence

from ssd_target.scheduling.sequence import Sequence as TokenSequence

OLDEST_EVERY = 4  # turns of an identity


class PrefillTurns:
    """Chooses which of the prompts that are being read come next."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # tokens of late, by identity
        self._turns: dict[str, int] = {}

    def choose(
        self,
        sequences: Sequence[TokenSequence],
        left: Callable[[TokenSequence], int],
        size: Callable[[TokenSequence], int],
        budget: int,
    ) -> list[TokenSequence]:
        """Those whose next pieces fit into the budget, oldest first in ``sequences``; the first
        always does. ``left``: tokens to be read; ``size``: of the next piece."""
        queues = self._queues(sequences, left)
        self._take_part(queues)
        self._turns = {owner: self._turns.get(owner, 0) for owner in queues}
        chosen: list[TokenSequence] = []
        while queues:
            owner = min(queues, key=lambda each: (self._given[each], left(queues[each][0])))
            sequence = queues[owner].pop(0)
            if chosen and size(sequence) > budget:
                break
            budget -= size(sequence)
            chosen.append(sequence)
            self._given[owner] += size(sequence)
            self._turns[owner] += 1
            if not queues[owner]:
                del queues[owner]
        return chosen

    def _take_part(self, owners: Collection[str]) -> None:
        """Only these want something now. One that was idle has no claim to more."""
        known = {owner: self._given[owner] for owner in owners if owner in self._given}
        least = min(known.values(), default=0.0)
        self._given = {owner: known.get(owner, least) - least for owner in owners}

    def _queues(
        self, sequences: Sequence[TokenSequence], left: Callable[[TokenSequence], int]
    ) -> dict[str, list[TokenSequence]]:
        queues: dict[str, list[TokenSequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.owner, []).append(sequence)
        for owner, queue in queues.items():
            oldest = queue[0]
            queue.sort(key=left)  # stable: of equals the older one
            if self._turns.get(owner, 0) % OLDEST_EVERY == OLDEST_EVERY - 1:
                queue.remove(oldest)
                queue.insert(0, oldest)
        return queues
