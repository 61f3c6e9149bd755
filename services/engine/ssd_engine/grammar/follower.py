"""Where one text stands in its grammar, and which tokens can come next."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher

from ssd_engine.grammar.allowed import Allowed

MOST_KEPT = 32  # places


class GrammarFollower:
    """Goes back and forth between the texts that one sequence may become."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """``matcher`` stands at the beginning, and is of use to nobody else."""
        self._start, self._matcher = matcher.deep_copy(), matcher
        self._vocab_size, self._num_bytes = vocab_size, -(-vocab_size // 8)
        self._path: list[int] = []  # tokens up to where it stands
        self._allowed: dict[int, Allowed] = {}  # what was asked for, by places of this path
        # Of the same grammar, for other texts that the sequence may become.
        self.others: list[GrammarFollower] = []
        # Whether there was a place in its rounds that no token can follow.
        self.is_stuck = False
        self.problem = "no token of this model can go on with the grammar here"

    def allowed(self, output: Sequence[int], tail: Sequence[int] = ()) -> Allowed | None:
        """The tokens that can follow output and tail. There is none when a bound was reached, or no
        token spells what must come: ``problem`` says so then. None where these are no text of the
        grammar, so that nothing will ever be drawn after them."""
        if not self._go_to([*output, *tail]):
            return None
        place = len(self._path)
        if place not in self._allowed:
            self._allowed[place] = self._compute()
        return self._allowed[place]

    def at(self, text: Sequence[int]) -> LLMatcher | None:
        """The library's, which stands after this text until somebody asks for another place. None
        where it is no text of the grammar."""
        return self._matcher if self._go_to(text) else None

    def _compute(self) -> Allowed:
        bits = np.zeros(self._num_bytes, np.uint8)
        mask = self._matcher.compute_bitmask()
        if self._note_problem():
            return bits
        found = np.frombuffer(mask, np.uint8)[: self._num_bytes]
        bits[: len(found)] = found
        return bits

    def num_allowed(self, output: Sequence[int], tail: Sequence[int]) -> int:
        """How many tokens of the tail can follow the output, one after another."""
        if not self._go_to(output):
            return 0
        count = self._matcher.validate_tokens(self.known(tail))
        self._note_problem()
        return count

    def _note_problem(self) -> bool:
        if not self._matcher.is_error():
            return False
        self.problem = self._matcher.get_error().strip()
        return True

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """The next tokens, as far as there is no other in their place."""
        return self._matcher.compute_ff_tokens()[:most] if self._go_to(output) else []

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are a beginning of a text of the grammar."""
        if self._note_problem():  # at a place that perhaps no text will reach
            self._matcher, self._path, self._allowed = self._start.deep_copy(), [], {}
        tokens = tokens if isinstance(tokens, list) else list(tokens)
        common = _common(self._path, tokens)
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
            self._allowed = {at: bits for at, bits in self._allowed.items() if at <= common}
        new = tokens[common:]
        if len(self._allowed) > MOST_KEPT:
            self._allowed = {}
        done = self._matcher.try_consume_tokens(self.known(new)) if new else 0
        self._path += new[:done]
        return done == len(new)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Up to the first that is no token: after one the library would say no more."""
        if max(tokens, default=0) < self._vocab_size:
            return list(tokens)
        return list(takewhile(lambda token: token < self._vocab_size, tokens))


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with. Texts are long, and lists are compared in no time."""
    known, unknown = 0, min(len(a), len(b))
    if a[:unknown] == b[:unknown]:
        return unknown
    while unknown - known > 1:  # they differ before the latter
        middle = (known + unknown) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            unknown = middle
    return known
