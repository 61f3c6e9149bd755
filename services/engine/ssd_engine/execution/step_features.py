"""The residual stream of steps at some boundaries: where captured steps leave it."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ssd_engine.kernels.elementwise import overlapping, tap_kernel
from ssd_engine.models.decoder import Decoder
from ssd_engine.models.features import FeatureTap

PIECE = 1024  # entries of a row that a program copies


class DeviceTap(FeatureTap):
    """A copy that keeps its place in a chain of kernels, each of which begins early."""

    def __init__(self, boundaries: Sequence[int], out: Tensor, overlap: bool) -> None:
        super().__init__(boundaries, out)
        self._overlap = overlap

    def _copy(self, hidden: Tensor, place: int) -> None:
        rows, width = hidden.shape
        tap_kernel[(triton.cdiv(width, PIECE), rows)](
            hidden,
            self.out[:, place * width :],
            width,
            self.out.stride(0),
            PIECE=PIECE,
            **overlapping(self._overlap),
        )


class StepFeatures:
    """Buffers that all shapes share, one for each side: rows of a step stay until the step after
    the next one begins."""

    def __init__(
        self, model: Decoder, boundaries: Sequence[int], rows: int, num_sides: int, overlap: bool
    ) -> None:
        self.boundaries = tuple(boundaries)
        norm, width = model.weights.norm, len(self.boundaries) * model.config.hidden_size
        self.taps = [
            DeviceTap(self.boundaries, norm.new_zeros(rows, width), overlap)
            for _ in range(num_sides)
        ]

    def warm_up(self, hidden: Tensor) -> None:
        """What is compiled on first use is compiled now, for rows of this kind."""
        with torch.inference_mode():
            for boundary in self.boundaries:
                self.taps[0](boundary, hidden)

    def rows(self, side: int, count: int) -> Tensor:
        """[count, boundaries * d], to which nobody writes any more."""
        return self.taps[side].out[:count].clone()
