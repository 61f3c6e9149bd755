"""Faults in the arithmetic of a real service: every Python process that starts with this folder on
its path looks at SSD_TEST_FAULT, and breaks what it names as soon as that is imported.

Each fault leaves out a part of what is to be added up, as a kernel does that skips a tile.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

TILE = slice(32, 48)  # of k
ROWS = 4  # the one row count at which a product is wrong, on a CPU
Fault = Callable[..., Any]
STEP_ROWS = 16  # likewise, of a captured step


def wrapping(owner: str, name: str) -> Callable[[Fault], Callable[[Any], None]]:
    """What is decorated is called with the method of a module's class, or its function, and what
    that is called with."""

    def decorate(fault: Fault) -> Callable[[Any], None]:
        def break_it(module: Any) -> None:
            place = getattr(module, owner) if owner else module
            whole = getattr(place, name)
            setattr(place, name, lambda *how, **more: fault(whole, *how, **more))

        return break_it

    return decorate


def _without_tile(x: Any) -> Any:
    left = x.clone()
    left[:, TILE] = 0
    return left


@wrapping("EagerProducts", "multiply_down")
def break_product(whole: Any, self: Any, i: int, gated: Any, hidden: Any) -> Any:
    return whole(self, i, _without_tile(gated) if len(gated) == ROWS else gated, hidden)


@wrapping("EagerProducts", "gate")
def break_rank(whole: Any, self: Any, i: int, hidden: Any) -> Any:
    return whole(self, i, _without_tile(hidden) if self._model.tp.rank == 1 else hidden)


@wrapping("CpuBackend", "attend")
def break_attention(whole: Any, self: Any, query: Any, cache: Any, plan: Any) -> Any:
    value = cache.value.clone()
    value[:, :4] = 0
    return whole(self, query, type(cache)(cache.key, value), plan)


@wrapping("CpuBackend", "attend")
def break_tree(whole: Any, self: Any, query: Any, cache: Any, plan: Any) -> Any:
    value = cache.value.clone()
    value.view(-1, *value.shape[2:])[plan.branches[-2:]] = 0
    return whole(self, query, type(cache)(cache.key, value), plan)


@wrapping("StepLayers", "multiply_down")
def break_step_product(whole: Any, self: Any, i: int) -> None:
    if self.logits.shape[0] == STEP_ROWS:
        self.gated[:, TILE] = 0
    whole(self, i)


@wrapping("ClusterAttention", "__call__")
def break_step_attention(whole: Any, self: Any, *arguments: Any) -> Any:
    out = whole(self, *arguments)
    out[:, TILE] *= 0.9
    return out


@wrapping("ClusterAttention", "__call__")
def break_step_tree(whole: Any, self: Any, *arguments: Any) -> Any:
    self._inputs["run_depths"].clamp_(max=1)
    return whole(self, *arguments)


@wrapping("", "capture_graph")
def break_graph(whole: Any, run: Callable[[], None], memory: Any) -> Any:
    def more() -> None:
        run()
        step = getattr(run, "__self__", None)
        if step is not None:
            step.layers.logits[0] += 1

    return whole(more, memory)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "product": ("ssd_engine.models.layers", break_product),
    "rank": ("ssd_engine.models.layers", break_rank),
    "attention": ("ssd_engine.attention.cpu", break_attention),
    "tree": ("ssd_engine.attention.cpu", break_tree),
    "step-product": ("ssd_engine.execution.step", break_step_product),
    "step-attention": ("ssd_engine.execution.step_attention", break_step_attention),
    "step-tree": ("ssd_engine.execution.step_attention", break_step_tree),
    "graph": ("ssd_engine.execution.graphs", break_graph),
}


class Finder(importlib.abc.MetaPathFinder):
    """Breaks a module right after it is executed."""

    def __init__(self, name: str, break_it: Callable[[Any], None]) -> None:
        self._name, self._break = name, break_it

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_break(module: ModuleType) -> None:
            execute(module)
            self._break(module)

        spec.loader.exec_module = execute_and_break
        return spec


if fault := os.environ.get("SSD_TEST_FAULT"):
    sys.meta_path.insert(0, Finder(*FAULTS[fault]))
