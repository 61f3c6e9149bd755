"""The findings of a check: how far each operation is from plain torch, and whether too far."""

import logging
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_engine.errors import SelfCheckError
from ssd_engine.models.tensor_parallel import TensorParallel
from ssd_engine.self_check.expected import TOLERANCE, Expected, unit_of

log = logging.getLogger(__name__)

HELD_SECONDS = 10.0  # other ranks wait so long while rank 0 tells what was found
_NONE = 1 << 62


@dataclass(frozen=True)
class CheckedOperation:
    use: str  # "prefill", "step", "tree step"
    rows: int
    layer: int | None  # None: before or after all layers
    operation: str
    remedy: str  # the option that avoids the operation

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"{layer}{self.operation} of a {self.use} of {self.rows} rows"


class Findings:
    """Errors in units of what rounding explains. They stay on the device until all are there."""

    def __init__(self, dtype: torch.dtype, model: str) -> None:
        self._dtype, self._unit, self._model = dtype, unit_of(dtype), model
        self._places: list[CheckedOperation] = []
        self._errors: list[Tensor] = []

    def compare(self, place: CheckedOperation, got: Tensor, expected: Expected) -> None:
        error = (got.to(expected.value.dtype) - expected.value).abs()
        least = torch.finfo(self._dtype).tiny
        self.note(place, (error / (self._unit * expected.spread + least)).max())

    def compare_bits(self, place: CheckedOperation, got: Tensor, expected: Tensor) -> None:
        self.note(place, torch.where((got == expected).all(), 0.0, torch.inf))

    def note(self, place: CheckedOperation, error: Tensor) -> None:
        """More than TOLERANCE is too much."""
        self._places.append(place)
        # A NaN is as far off as can be.
        self._errors.append(error.double().nan_to_num(nan=torch.inf, posinf=torch.inf).reshape(()))

    def errors(self) -> list[tuple[CheckedOperation, float]]:
        if not self._errors:
            return []
        return list(zip(self._places, torch.stack(self._errors).tolist(), strict=True))

    def raise_if_wrong(self, tp: TensorParallel) -> None:
        """All ranks agree on the first place that is wrong on any of them."""
        errors = self.errors()
        wrong = [i for i, (_, error) in enumerate(errors) if not error <= TOLERANCE]
        for i in wrong[:3]:
            log.error("%s: off by %.3g times what rounding explains", *errors[i])
        first = tp.minimum(wrong[0] * tp.size + tp.rank if wrong else _NONE)
        if first == _NONE:
            return
        if tp.rank:
            time.sleep(HELD_SECONDS)  # a rank that ends first would be all that is told
        raise SelfCheckError(self._reason(errors, first // tp.size, first % tp.size, tp))

    def _reason(
        self,
        errors: list[tuple[CheckedOperation, float]],
        number: int,
        rank: int,
        tp: TensorParallel,
    ) -> str:
        place, error = errors[number]
        whose = f"rank {rank}, " if tp.size > 1 else ""
        dtype = str(self._dtype).removeprefix("torch.")
        size = f"by {error:.3g} roundings of {dtype}, {TOLERANCE:g} are allowed"
        if rank != tp.rank or math.isinf(error):  # no numbers, or bits that must be equal
            size = f"by more than rounding to {dtype} explains"
        remedy = place.remedy
        if math.isinf(error) and self._dtype is torch.float16:
            remedy = "float16 may be too narrow for this model: --dtype bfloat16 is wider"
        return (
            f"self-check of {self._model}: {whose}{place} differs from plain torch {size}; "
            f"{remedy}; --no-self-check serves it all the same"
        )
