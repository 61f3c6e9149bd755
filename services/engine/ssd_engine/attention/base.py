"""What a backend is given and what it must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


AttentionPlan = Any  # each backend's own; made once per forward, used by every layer


class AttentionBackend(Protocol):
    def plan(self, runs: Sequence[QueryRun]) -> AttentionPlan:
        """Prepare a forward whose rows are those of ``runs``, in order."""
        ...

    def attend(self, query: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """query [rows, heads, head_dim] against the cache: [rows, heads * head_dim]."""
        ...
