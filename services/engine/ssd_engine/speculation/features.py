"""What a draft reads of its target's hidden states. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FeatureNeeds:
    """Rows of the target's residual stream at some boundaries, one after the other: boundary i is
    before layer i, that of as many as there are layers after the last one."""

    boundaries: tuple[int, ...]
    hidden_size: int  # the target's
    dtype: str

    @property
    def width(self) -> int:
        """The values of one token's features."""
        return len(self.boundaries) * self.hidden_size
