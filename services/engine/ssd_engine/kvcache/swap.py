"""Copies of KV blocks between the cache and the host's memory. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks of the cache are copied to places of the host's memory, side by side, or back."""

    out: bool
    place: int  # where the first block goes, or comes from
    blocks: Sequence[int]

    def encode(self) -> list[int]:
        return [int(self.out), self.place, *self.blocks]

    @classmethod
    def decode(cls, values: Sequence[int]) -> "Swap":
        out, place, *blocks = values
        return cls(bool(out), place, blocks)
