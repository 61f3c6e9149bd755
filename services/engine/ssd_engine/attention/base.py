"""What a backend is given and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ssd_engine.kv_cache import LayerCache


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

    Each sees the first ``context`` tokens, and of the slots in ``tail`` those that ``visible``
    grants it. The context is read once for all rows, and there is no mask over it.
    """

    length: int
    context: int
    blocks: Sequence[int]
    tail: Sequence[int]  # slots: block * block_size + offset
    visible: NDArray[np.bool_]  # [length, tail]


Run = QueryRun | TreeRun
AttentionPlan = Any  # each backend's own; made once per forward, used by every layer


class AttentionBackend(Protocol):
    def plan(self, runs: Sequence[Run]) -> AttentionPlan:
        """Prepare a forward whose rows are those of ``runs``, in order."""
        ...

    def attend(self, query: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """query [rows, heads, head_dim] against the cache: [rows, heads * head_dim]."""
        ...
