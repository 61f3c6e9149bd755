"""The tokens of a sequence so far, as drawing its next ones needs them. Plain data, no torch."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The tokens that penalties and a grammar look at, and the options. ``output`` is the
    sequence's own list: it grows."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]  # committed
    grammar: GrammarFollower | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: list[int],
        output: list[int],
        grammar: GrammarFollower | None = None,
    ) -> "History | None":
        """A sequence's history; None where nothing asks for one."""
        needed = params.adjusts_logits or grammar is not None
        return cls(params, prompt, output, grammar) if needed else None


@dataclass(frozen=True, slots=True, eq=False)
class Extended(Collection[int]):
    """Tokens, and a tail after them: they may be many, and are not copied."""

    tokens: list[int]
    tail: list[int]

    def __len__(self) -> int:
        return len(self.tokens) + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        return chain(self.tokens, self.tail)

    def __contains__(self, token: object) -> bool:
        return token in self.tokens or token in self.tail
