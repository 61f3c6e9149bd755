"""Where one text stands in its grammar, and which tokens can come next."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher

from ssd_engine.grammar.allowed import Allowed

MOST_KEPT = 32  # places

Answer = TypeVar("Answer")


class GrammarFollower:
    """Goes back and forth between the texts that one sequence may become.

    The library bounds its work. What it has learnt adds up, also at places that no text reaches: so
    where it stops, another one is asked that has read nothing but the text. Whether that one stops,
    too, is a matter of the text alone.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, renew: Callable[[], LLMatcher] | None
    ) -> None:
        """``matcher`` stands at the beginning, and is nobody else's. ``renew`` makes another one;
        None: that would take too long."""
        self._matcher, self._renew = matcher, renew
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
        text = [*output, *tail]
        found = self._ask(lambda: self._find_allowed(text))
        return np.zeros(self._num_bytes, np.uint8) if self._is_stopped() else found

    def at(self, text: Sequence[int]) -> LLMatcher | None:
        """The library's, which stands after this text until somebody asks for another place. None
        where it is no text of the grammar, or where a bound is reached."""
        reached = self._ask(lambda: self._go_to(text))
        return self._matcher if reached and not self._is_stopped() else None

    def num_allowed(self, output: Sequence[int], tail: Sequence[int]) -> int:
        """How many tokens of the tail can follow the output, one after another."""
        known = self.known(tail)
        return self._ask(lambda: self._matcher.validate_tokens(known) if self._go_to(output) else 0)

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """The next tokens, as far as there is no other in their place."""
        return self._ask(
            lambda: self._matcher.compute_ff_tokens()[:most] if self._go_to(output) else []
        )

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        answer = question()
        if self._is_stopped() and self._renew is not None:
            self._matcher, self._path, self._allowed = self._renew(), [], {}
            answer = question()
            self._is_stopped()
        return answer

    def _is_stopped(self) -> bool:
        if not self._matcher.is_error():
            return False
        self.problem = self._matcher.get_error().replace("<non-verbose/>", "").strip()
        return True

    def _find_allowed(self, text: list[int]) -> Allowed | None:
        if not self._go_to(text):
            return None
        place = len(self._path)
        if place not in self._allowed:
            self._allowed[place] = self._compute()
        return self._allowed[place]

    def _compute(self) -> Allowed:
        bits = np.zeros(self._num_bytes, np.uint8)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._num_bytes]
        bits[: len(found)] = found
        return bits

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are a beginning of a text of the grammar."""
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
        if min(tokens, default=0) >= 0 and max(tokens, default=0) < self._vocab_size:
            return list(tokens)
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))


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
