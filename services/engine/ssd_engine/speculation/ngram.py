"""Speculation without a model: what followed the last time the text ended like this.

One index per sequence. For every n-gram of the text it knows where a token last followed it, and
a chain to the times before: O(max_n) time and less than 1 KB of host memory per token.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

Gram = tuple[int, ...]

NONE = -1
MAX_OCCURRENCES = 64  # the latest of one n-gram, which ``candidates`` looks at


class NgramIndex:
    """Look-up in committed tokens; a *tail* holds hypothetical ones that may follow them.

    A tail counts as text in every way, but only for the call that brings it.
    """

    def __init__(self, max_n: int = 4, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"1 <= min_n <= max_n, got min_n {min_n} and max_n {max_n}")
        self._lengths = range(1, max_n + 1)
        self._min_n = min_n
        self._text: list[int] = []
        # An occurrence of an n-gram is the index of the token that follows it. For each n: the
        # latest occurrence of a gram, and for an occurrence the one before it.
        self._latest: dict[int, dict[Gram, int]] = {n: {} for n in self._lengths}
        self._before: dict[int, array[int]] = {n: array("i") for n in self._lengths}

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        for token in tokens:
            self._push(token)

    def propose(self, k: int, tail: Sequence[int] = ()) -> list[int]:
        """What followed the latest earlier occurrence of the longest suffix: k tokens or none.

        A suffix has min_n to max_n tokens. Where the text ends the proposal goes on with itself:
        a loop is proposed as a loop.
        """
        with self._assumed(tail):
            for n in reversed(self._lengths):
                begin = next(self._occurrences(n), None) if n >= self._min_n else None
                if begin is not None:
                    return self._copy(begin, k)
        return []

    def candidates(self, n: int, tail: Sequence[int] = ()) -> list[int]:
        """Up to n distinct tokens that may come next, likeliest first.

        Those that followed a longer suffix come first, down to a suffix of one token whatever
        min_n is; then the more frequent; then the more recent.
        """
        found: dict[int, None] = {}
        with self._assumed(tail):
            for length in reversed(self._lengths):
                latest = islice(self._occurrences(length), MAX_OCCURRENCES)
                followed = Counter(self._text[i] for i in latest)
                # Equal counts stay in the order in which they were met: latest first.
                found |= dict.fromkeys(token for token, _ in followed.most_common())
                if len(found) >= n:
                    break
        return list(found)[:n]

    @contextmanager
    def _assumed(self, tail: Sequence[int]) -> Iterator[None]:
        self.extend(tail)
        try:
            yield
        finally:
            for _ in tail:
                self._pop()

    def _push(self, token: int) -> None:
        i = len(self._text)
        for n in self._lengths:
            gram = self._suffix(n)
            self._before[n].append(self._latest[n].get(gram, NONE))
            self._latest[n][gram] = i
        self._text.append(token)

    def _pop(self) -> None:
        """Undo the last push, to the bit."""
        self._text.pop()
        for n in self._lengths:
            gram, before = self._suffix(n), self._before[n].pop()
            if before == NONE:
                del self._latest[n][gram]
            else:
                self._latest[n][gram] = before

    def _suffix(self, n: int) -> Gram:
        """The last n tokens; fewer when the text is shorter."""
        return tuple(self._text[-n:])

    def _occurrences(self, n: int) -> Iterator[int]:
        """Where the suffix of n tokens was followed before, latest first."""
        i = self._latest[n].get(self._suffix(n), NONE)
        while i != NONE:
            yield i
            i = self._before[n][i]

    def _copy(self, begin: int, k: int) -> list[int]:
        end = len(self._text)
        copied = self._text[begin : begin + k]
        while len(copied) < k:
            copied.append(copied[begin + len(copied) - end])
        return copied
