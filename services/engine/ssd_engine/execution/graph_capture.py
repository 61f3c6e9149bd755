"""Captures what is launched as a graph, while steps may be in flight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch


def capture_graph(run: Callable[[], None], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph, and the memory that it shares with others. Unlike ``torch.cuda.graph`` it neither
    waits for the device nor gives memory back to it, as long as there is enough.

    Each rank tries again by itself: what is captured is exchanged when it is replayed."""
    try:
        return _capture(run, memory)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()  # here nothing holds what was captured until then
    return _capture(run, memory)


def _capture(run: Callable[[], None], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with out_of_memory_told(), torch.cuda.stream(_capture_stream()):
        # Threads of planes go on meanwhile: only what this one does is part of the graph.
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # what went wrong is said by what ran
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, graph.pool()


@contextmanager
def out_of_memory_told() -> Iterator[None]:
    """A device without memory for a graph is OutOfMemoryError, as where torch allocates."""
    try:
        yield
    except torch.AcceleratorError as error:
        if "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()
