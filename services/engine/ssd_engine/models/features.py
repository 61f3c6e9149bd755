"""What layers tell of their rows beside logits: the residual stream at boundaries between them."""

from collections.abc import Sequence

from torch import Tensor

from ssd_engine.errors import ConfigError


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> None:
    """Raises ConfigError for one that the model does not have."""
    outside = [each for each in boundaries if not 0 <= each <= num_layers]
    if outside:
        raise ConfigError(
            f"boundary {outside[0]} is asked for: the model has {num_layers} layers, "
            f"name boundaries from 0 to {num_layers}"
        )


class FeatureTap:
    """Keeps the hidden states at some boundaries, side by side.

    Boundary 0 is before the first layer, boundary i + 1 after layer i.
    """

    def __init__(self, boundaries: Sequence[int], out: Tensor) -> None:
        """``out``: [rows or more, boundaries * d]"""
        self._boundaries, self.out = tuple(boundaries), out

    def __call__(self, boundary: int, hidden: Tensor) -> None:
        """A copy: layers add to the hidden states in their place."""
        for place, wanted in enumerate(self._boundaries):
            if wanted == boundary:
                self._copy(hidden, place)

    def _copy(self, hidden: Tensor, place: int) -> None:
        rows, width = hidden.shape
        self.out[:rows, place * width : (place + 1) * width].copy_(hidden)
