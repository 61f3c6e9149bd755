"""What the engine asks of whoever computes: forwards of prompts, steps of rounds, copies of KV."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from ssd_engine.forward.batch import Draw, Part
from ssd_engine.forward.result import ForwardResult, PendingForward, Score
from ssd_engine.kvcache.swap import Swap


class TargetRunner(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def asynchronous(self) -> bool: ...

    @property
    def chains(self) -> bool: ...

    @property
    def gap_seconds(self) -> float: ...

    @property
    def features(self) -> Tensor | None:
        """What the rows of the last ``forward`` told, where they are watched."""

    def beside_forwards(self) -> AbstractContextManager[object]:
        """What is done inside does not wait for what was launched last."""

    def prepare_watch(self, boundaries: Sequence[int]) -> bool:
        """Does a part of what a watch of these needs; True: nothing is left to do before it."""

    def watch(self, boundaries: Sequence[int]) -> None: ...

    def forward(
        self, parts: Sequence[Part], launched: Callable[[], None], score: Score
    ) -> Tensor | None: ...

    def draw(self, logits: Tensor | None, draws: Sequence[Draw | None]) -> ForwardResult: ...

    def step(
        self, parts: Sequence[Part], draws: Sequence[Draw | None], launched: Callable[[], None]
    ) -> PendingForward: ...

    def swap(self, swap: Swap) -> None: ...
