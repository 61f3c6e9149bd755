"""A head whose captured steps compute something else than its plain forward is found."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import load_head_config
from ssd_engine.errors import SelfCheckError
from ssd_engine.execution import graphs
from ssd_engine.execution.graphs import GraphRunner
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.head_step import HeadStepLayers, HeadStepProducts, ToldStates
from ssd_engine.execution.runner_options import RunnerOptions
from ssd_engine.execution.step import Step
from ssd_engine.self_check import heads as checking
from ssd_engine.self_check.heads import check_head, load_checked_head
from tests.engine.execution.test_head_step import DUMMY, NUM_BLOCKS, TREE
from tests.engine.execution.test_step_features import Event, Stream
from tests.harness import BLOCK
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a device has events of its own"),
]

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    make_model("llama3-untied", folder / "target")
    make_head(KINDS["llama"], folder / "head")
    return folder


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.torch.cuda, "Event", Event)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", Stream)


def load(folder: Path, make: Callable[..., HeadRunner] = HeadRunner) -> HeadRunner:
    options = RunnerOptions(
        directory=folder / "head",
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        max_model_len=160,
        max_num_seqs=4,
        max_forward_tokens=64,
        num_kv_blocks=NUM_BLOCKS,
        kernels="torch",
        step_rows=3,
        branches=4,
        max_tail=8,
        ranks=3,
        self_check=True,
    )
    config = load_head_config(folder / "head")
    checkpoint = open_head(folder / "head", config, folder / "target")
    return make(config, checkpoint, options, SHAPE["vocab_size"])


def with_steps(runner: HeadRunner) -> HeadRunner:
    """As a device has them."""
    runner.num_blocks, runner.dummy_slot = NUM_BLOCKS - 1, DUMMY
    told = runner._told_states = ToldStates(runner.model, TREE.padded_rows)
    layers = partial(HeadStepLayers, runner._states, told)
    one = Step(runner.model, runner.kv, TREE, 3, num_sides=2, make_layers=layers)
    one.inputs.clear(DUMMY)
    runner.steps = GraphRunner([one], eager=True)
    return runner


def test_a_head_that_is_right_passes_and_is_left_as_it_was(folder: Path) -> None:
    runner = with_steps(load(folder))
    errors = check_head(runner).errors()
    places = {(place.use, place.operation) for place, _ in errors}
    assert {"head's step", "head's tree step"} == {use for use, _ in places}
    assert {"logits", "state for the next row"} == {operation for _, operation in places}
    assert 0 < max(error for _, error in errors) < 2
    keep = torch.arange(len(runner.states)) // BLOCK != DUMMY // BLOCK  # what pads
    assert not runner.states[keep].any()


def forget_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToldStates, "put", lambda *about: None)


def leave_out_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    project = HeadStepProducts.project

    def broken(self: HeadStepProducts, i: int, hidden: Tensor) -> Tensor:
        if not i:
            self._both[:, 16:24] = 0
        return project(self, i, hidden)

    monkeypatch.setattr(HeadStepProducts, "project", broken)


def leave_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = HeadStepLayers.finish

    def broken(self: HeadStepLayers) -> Tensor:
        kept = self._states.rows.clone()
        logits = finish(self)
        self._states.rows.copy_(kept)
        return logits

    monkeypatch.setattr(HeadStepLayers, "finish", broken)


def misplace_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = HeadStepLayers.finish
    monkeypatch.setattr(HeadStepLayers, "finish", lambda self: finish(self).roll(1, dims=1))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (forget_told, "logits of a head's step"),
        (leave_out_a_tile, "logits of a head's step"),
        (leave_no_states, "state for the next row of a head's step"),
        (misplace_tokens, "logits of a head's step"),
    ],
)
def test_a_step_that_is_wrong_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, harm: Break, words: str
) -> None:
    runner = with_steps(load(folder))
    harm(monkeypatch)
    with pytest.raises(SelfCheckError, match=f"self-check of head: {words} .*--no-self-check"):
        check_head(runner)


def test_services_load_heads_that_are_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(checking, "check_head", checked.append)
    assert checked == [load(folder, load_checked_head)]

    def unchecked(config: Any, checkpoint: Any, options: RunnerOptions, tokens: int) -> HeadRunner:
        options = replace(options, self_check=False)
        return load_checked_head(config, checkpoint, options, tokens)

    load(folder, unchecked)
    assert len(checked) == 1
