"""A head's runner as the runner of a draft model: parts bring their features along."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.forward.batch import Chunk, Draw, KVCopy, Part
from ssd_engine.forward.result import PendingForward


@dataclass(frozen=True, slots=True, eq=False)
class ToldChunk(Chunk):
    """A chunk all of whose rows the target has told."""

    features: Tensor = field(kw_only=True)  # [tokens, width]


class HeadSteps:
    """What follows a row is known when its forward has been looked at: no forward is launched
    ahead."""

    chains = False

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    def step(self, parts: Sequence[Part], draws: Sequence[Draw | None]) -> PendingForward:
        rows = [part for part in parts if not isinstance(part, KVCopy)]
        counts = [len(part.tokens) if isinstance(part, ToldChunk) else 0 for part in rows]
        told = [part.features for part in rows if isinstance(part, ToldChunk)]
        given = GivenFeatures(counts, torch.cat(told) if told else torch.empty(0))
        return self._runner.step_with_features(parts, draws, given)

    def deepen(
        self, flight: PendingForward, slots: Sequence[int], widths: Sequence[int]
    ) -> PendingForward | None:
        return None
