"""A forward of a test's own, seen as a runner that computes when it is asked to."""

from collections.abc import Callable, Sequence
from typing import Any

from ssd_engine.forward.result import ForwardResult, ImmediateForward


class DrawsNothing:
    """What is drawn is drawn from the logits."""

    def draw(self, logits: Any, draws: Sequence[Any]) -> ForwardResult:
        return ForwardResult(lambda: logits)


class ByForward(DrawsNothing):
    asynchronous = chains = False
    gap_seconds = 0.0

    def __init__(self, num_blocks: int, forward: Callable[..., Any]) -> None:
        self.num_blocks = num_blocks
        self.forward = forward

    def step(self, parts: Sequence[Any], draws: Sequence[Any], *launched: Any) -> ImmediateForward:
        return ImmediateForward(lambda: self.forward(parts, *launched))

    def swap(self, swap: Any) -> None:
        raise NotImplementedError
