"""The interface of an attention backend: what it is given, and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.forward.batch import slots_at
from ssd_engine.kvcache.cache import LayerCache


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive tokens of one sequence: ``length`` query rows that end a context.

    Row i sees the first ``context - length + i + 1`` tokens of the sequence.
    """

    length: int
    context: int  # tokens of the sequence in the cache once this forward has written its own
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class TreeRun:
    """Rows that continue one sequence side by side.

    Row i sees the positions up to ``limits[i]``, and of the slots in ``scratch``, as many for each
    depth as there are rows, those of its own branch. All see the first ``context`` positions: these
    are read once for all rows, and there is no mask over them.
    """

    length: int
    context: int
    blocks: Sequence[int]
    limits: Sequence[int]
    scratch: Sequence[int]  # slots: block * block_size + offset

    @property
    def tail_length(self) -> int:
        return max(self.limits) + 1 - self.context + len(self.scratch)

    def tail(self, block_size: int) -> list[int]:
        """Slots after the context: those of the sequence, then the scratch."""
        own = range(self.context, max(self.limits) + 1)
        return [*slots_at(self.blocks, own, block_size), *self.scratch]

    def visible(self) -> NDArray[np.bool_]:
        """[length, tail]"""
        limits = np.array(self.limits)[:, None]
        on_sequence = np.arange(self.context, limits.max() + 1) <= limits
        own = np.tile(np.eye(self.length, dtype=bool), len(self.scratch) // self.length)
        return np.concatenate((on_sequence, own), axis=1)


Run = QueryRun | TreeRun
AttentionPlan = Any  # each backend's own; made once per forward, used by every layer


class AttentionBackend(Protocol):
    dummy_block: int  # belongs to no sequence; what pads a run may read it

    def plan(self, runs: Sequence[Run]) -> AttentionPlan:
        """Prepare a forward whose rows are those of ``runs``, in order."""

    def attend(self, query: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """query [rows, heads, head_dim] against the cache: [rows, heads * head_dim]."""
