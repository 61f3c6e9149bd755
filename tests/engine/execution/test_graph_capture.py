"""A graph for which there is no memory at first is captured with what torch holds unused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ssd_engine.execution import graphs
from ssd_engine.execution.graphs import capture_graph

NO_MEMORY = torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError...'")
Happening = Callable[..., list[str]]


@pytest.fixture
def happening(monkeypatch: pytest.MonkeyPatch) -> Happening:
    def install(*ends: Exception | None) -> list[str]:
        """What happens; a graph is made, or is not, as these say, one after the other."""
        happened, left = list[str](), iter(ends)

        class Graph:
            def capture_begin(self, memory: Any, capture_error_mode: str) -> None:
                happened.append("begin")

            def capture_end(self) -> None:
                if (error := next(left)) is not None:
                    raise error

            def pool(self) -> str:
                return "memory"

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(graphs, "_capture_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty"))
        return happened

    return install


def test_a_capture_that_runs_out_of_memory_is_tried_again_once_after_the_cache_is_given_back(
    happening: Happening,
) -> None:
    happened = happening(None)
    assert capture_graph(lambda: None, None)[1] == "memory"
    assert happened == ["begin"]
    happened = happening(NO_MEMORY, None)
    assert capture_graph(lambda: None, None)[1] == "memory"
    assert happened == ["begin", "empty", "begin"]


def test_a_graph_that_is_never_made_for_want_of_memory_is_an_out_of_memory_error(
    happening: Happening,
) -> None:
    happened = happening(NO_MEMORY, NO_MEMORY)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        capture_graph(lambda: None, None)
    assert happened == ["begin", "empty", "begin"]


def test_what_else_fails_is_no_want_of_memory(happening: Happening) -> None:
    happened = happening(torch.AcceleratorError("CUDA error: an illegal memory access"))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        capture_graph(lambda: None, None)
    assert happened == ["begin"]


def test_what_ran_says_what_went_wrong_and_not_the_end_of_its_capture(happening: Happening) -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    happening(torch.AcceleratorError("CUDA error: capture is invalid"), None)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 MiB"):
        capture_graph(run, None)
