"""What a head reads of its target, and what a target can tell. No torch here.

Boundary i is the residual stream before layer i; that of as many as there are layers, after the
last one. The *features* of a position are the hidden states of its token at some boundaries, one
after the other.
"""

from dataclasses import dataclass

from ssd_engine.tensor_plane.protocol.handshake import PlaneOffer
from ssd_engine.tensor_plane.protocol.streams import VALUE_BYTES

MAX_BOUNDARIES = 8  # of a head: nearly all have 3, and a target watches them for all of its links
MAX_HIDDEN_SIZE = 2**20


@dataclass(frozen=True)
class FeatureNeeds:
    """The features that a head reads."""

    boundaries: tuple[int, ...]
    hidden_size: int  # the target's
    dtype: str  # as rows travel

    @property
    def width(self) -> int:
        """The values of a row."""
        return len(self.boundaries) * self.hidden_size

    @property
    def row_bytes(self) -> int:
        return self.width * VALUE_BYTES[self.dtype]

    def problem_with(self, hidden_size: int, num_layers: int) -> tuple[str, str] | None:
        """The first field in which they do not fit such a target, and how; None where they do."""
        if self.hidden_size != hidden_size:
            return "hidden_size", f"the target has {hidden_size}, the head reads {self.hidden_size}"
        if not 1 <= len(self.boundaries) <= MAX_BOUNDARIES:
            return "boundaries", f"1 to {MAX_BOUNDARIES} are possible, got {len(self.boundaries)}"
        wrong = [each for each in self.boundaries if not 0 <= each <= num_layers]
        if wrong:
            return "boundaries", f"the target has 0 to {num_layers}, the head reads {wrong[0]}"
        if self.dtype not in VALUE_BYTES:
            return "dtype", f"{self.dtype[:32]!r} is none of {', '.join(VALUE_BYTES)}"
        return None


@dataclass(frozen=True)
class FeatureTerms:
    """What a head asks of the target of its link."""

    needs: FeatureNeeds
    window: int = 0  # tokens, the last ones, of use when a sequence is opened again; 0: any


@dataclass(frozen=True)
class FeatureOffer:
    """What a target can tell."""

    hidden_size: int
    num_layers: int
    dtype: str  # as it computes
    plane: PlaneOffer
