"""A grammar as a request names it. Plain data."""

from dataclasses import dataclass
from enum import IntEnum

MAX_GRAMMAR_BYTES = 1 << 18


class GrammarKind(IntEnum):
    JSON_SCHEMA = 1
    REGEX = 2
    CHOICES = 3  # the source is a list of texts, in JSON
    CONTEXT_FREE = 4  # Lark or GBNF

    @property
    def field(self) -> str:
        """The field of a request that it comes from."""
        return f"grammar.{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    source: str
