"""What a round verifies, and what came true of it."""

from collections.abc import Sequence

import msgspec


class Speculation(msgspec.Struct, frozen=True):
    """Tokens after the last committed one, each after its parent. For now they are a chain."""

    tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parents(self) -> Sequence[int]:
        """The place of the token that each one follows; -1: the last committed one."""
        return range(-1, len(self.tokens) - 1)


NOTHING = Speculation()


def accepted_path(speculation: Speculation, own: Sequence[int]) -> Sequence[int]:
    """The places of the tokens that were right, each the parent of the next.

    ``own``: what the target says after the last committed token, and after each speculated one.
    """
    for i, token in enumerate(speculation.tokens):
        if token != own[i]:
            return range(i)
    return range(len(speculation.tokens))
