"""Rows of a link that wait: for the frames that they belong to, or for a place at their sequence.

By sequence, so that only those are looked at whose rows may go on. What is held is bounded in bytes
of memory and in number; beyond that the oldest are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from torch import Tensor

MOST_SENDS = 4096  # of a link


@dataclass(frozen=True, slots=True, eq=False)
class WaitingSend:
    sequence: int
    start: int  # position
    rows: Tensor
    since: float

    @property
    def num_bytes(self) -> int:
        """That it holds."""
        return self.rows.untyped_storage().nbytes()


class WaitingRows:
    def __init__(self, max_bytes: int, max_sends: int = MOST_SENDS) -> None:
        self._max_bytes, self._max_sends = max_bytes, max_sends
        self._numbers = count()
        self._sends: dict[int, WaitingSend] = {}  # by number, the oldest first
        self._of: dict[int, dict[int, WaitingSend]] = {}  # the same by sequence
        self._first: dict[int, int] = {}  # by sequence: none of its rows is before this position
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sends)

    def first(self, sequence: int) -> int | None:
        """No row of the sequence that waits is before it; None where none waits."""
        return self._first.get(sequence)

    def bytes_of(self, sequence: int) -> int:
        return sum(send.num_bytes for send in self._of.get(sequence, {}).values())

    def add(self, send: WaitingSend) -> int:
        """Returns how many rows were dropped for it."""
        send = _without_rest(send)
        number = next(self._numbers)
        self._sends[number] = send
        self._of.setdefault(send.sequence, {})[number] = send
        self._first[send.sequence] = min(send.start, self._first.get(send.sequence, send.start))
        self.num_bytes += send.num_bytes
        dropped = 0
        while self.num_bytes > self._max_bytes or len(self._sends) > self._max_sends:
            dropped += len(self._remove(next(iter(self._sends))).rows)
        return dropped

    def take(self, sequence: int, end: int) -> list[WaitingSend]:
        """The sends of a sequence that begin before ``end``, by their positions."""
        own = self._of.get(sequence, {})
        numbers = [number for number, send in own.items() if send.start < end]
        taken = sorted((self._remove(number) for number in numbers), key=lambda send: send.start)
        if own:
            self._first[sequence] = min(send.start for send in own.values())
        return taken

    def drop(self, expired: Callable[[WaitingSend], bool]) -> int:
        """Returns how many rows these were."""
        numbers = [number for number, send in self._sends.items() if expired(send)]
        return sum(len(self._remove(number).rows) for number in numbers)

    def _remove(self, number: int) -> WaitingSend:
        send = self._sends.pop(number)
        own = self._of[send.sequence]
        del own[number]
        if not own:
            del self._of[send.sequence], self._first[send.sequence]
        self.num_bytes -= send.num_bytes
        return send


def _without_rest(send: WaitingSend) -> WaitingSend:
    """A piece of what was sent in memory of its own, unless it is most of it."""
    if send.num_bytes <= 2 * send.rows.nbytes:
        return send
    return WaitingSend(send.sequence, send.start, send.rows.clone(), send.since)
