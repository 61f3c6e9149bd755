"""A device where there is none: events and graphs of interpreted kernels, and small models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import fit_to_target, load_head_config
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.execution import graphs, step
from ssd_engine.execution.head_runner import GivenFeatures, HeadRunner
from ssd_engine.execution.runner import ModelRunner
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.forward.batch import Chunk, TreeRows
from ssd_engine.forward.step_inputs import StepShape
from tests.harness import BLOCK, make_runner
from tests.random_models import SMALL, make_model

SHAPE = StepShape(rows=4, runs=2, rows_per_run=2, max_positions=160, block_size=BLOCK)
DUMMY = 511 * BLOCK
BLOCKS = [list(range(10)), list(range(10, 20))]


class Event:
    """Of a device that computes at once."""

    def __init__(self, **_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Stream:
    def wait_event(self, _: Event) -> None: ...


class Graph:
    """Launches again what was launched while it was captured, as it was then."""

    captured: ClassVar[list["Graph"]] = []

    def __init__(self, one: Step, run: Callable[[], None]) -> None:
        self._step, self._run = one, run
        self._side, self._features = one._side, one._features
        Graph.captured.append(self)

    def replay(self) -> None:
        now = self._step._side, self._step._features
        self._step.use(self._side)
        self._step.watch(self._features)
        with torch.inference_mode():
            self._run()
        self._step.use(now[0])
        self._step.watch(now[1])


def emulate(monkeypatch: pytest.MonkeyPatch, event: type[Event] = Event) -> None:
    if torch.cuda.is_available():
        pytest.skip("a device has events of its own")
    monkeypatch.setattr(step, "LEADING_LAYERS", 1)
    monkeypatch.setattr(graphs.torch.cuda, "Event", event)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(graphs.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Graph, "captured", [])


def small_runner(
    directory: Path, family: str = "llama3-untied", layers: int = 2, device: str = "cpu"
) -> ModelRunner:
    """Of a random model with few layers and heads: interpreted kernels take their time."""
    with patch.dict(SMALL, num_attention_heads=4):
        make_model(family, directory)
    runner = make_runner(directory, device=device, kernels="torch")
    del runner.model.weights.layers[layers:], runner.kv.layers[layers:]
    return runner


def with_prompts(runner: ModelRunner) -> ModelRunner:
    """Of 120 tokens each, for steps of SHAPE that go on from them."""
    for blocks in BLOCKS:
        runner.forward([Chunk([7 * i % 512 for i in range(120)], 0, blocks, 0)])
    return runner


def head_runner(
    folder: Path,
    vocab: int,
    target: Path | None = None,
    name: str = "head",
    make: Callable[..., HeadRunner] = HeadRunner,
    **changes: Any,
) -> HeadRunner:
    """Of the head ``name`` in a folder. ``target``: its model, which is beside it by default."""
    settings: dict[str, Any] = dict(
        directory=folder / name,
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=512,
        max_num_seqs=4,
        max_forward_tokens=256,
        num_kv_blocks=64,
    )
    target = target or folder / "target"
    told = load_head_config(folder / name)
    config = fit_to_target(told, load_model_config(target), target.name)
    options = RunnerOptions(**{**settings, **changes})
    return make(config, open_head(folder / name, config, target), options, vocab)


def recurrent_logits(
    runner: HeadRunner, tokens: list[int], features: torch.Tensor, steps: int
) -> list[torch.Tensor]:
    """Of a told text, and of as many steps in which each row goes on by itself: after it come the
    tokens that follow it in the text."""
    rows, blocks = len(tokens), list(range(-(-len(tokens) // BLOCK)))
    given = GivenFeatures([rows], features)
    told = runner.step_with_features([Chunk(tokens, 0, blocks, rows)], [], given)
    found = [told.result().logits]
    scratch = [(len(blocks) + 1) * BLOCK + i for i in range(rows * steps)]
    for depth in range(1, steps):
        end = rows * depth
        tree = TreeRows(
            tokens=[*tokens[depth:], *[0] * depth],
            positions=[depth + row for row in range(rows)],
            limits=list(range(rows)),
            slots=scratch[end - rows : end],
            context=1,
            blocks=blocks,
            scratch=scratch[:end],
        )
        found.append(runner.step([tree], []).result().logits)
    return found
