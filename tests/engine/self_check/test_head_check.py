"""A head whose captured steps compute something else than its plain forward is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd_engine.errors import SelfCheckError
from ssd_engine.execution.graphs import GraphRunner
from ssd_engine.execution.head_runner import HeadRunner
from ssd_engine.execution.head_step import HeadStepLayers, HeadStepProducts, ToldStates
from ssd_engine.self_check import heads as checking
from ssd_engine.self_check import workload
from ssd_engine.self_check.heads import check_head, load_checked_head
from tests.engine.execution.emulated_device import emulate, head_runner
from tests.engine.execution.test_head_step import DUMMY, NUM_BLOCKS, TREE, make_step
from tests.engine.self_check.test_check import harm
from tests.harness import BLOCK
from tests.random_heads import KINDS, SHAPE, make_head
from tests.random_models import make_model

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    make_model("llama3-untied", folder / "target")
    make_head(KINDS["llama"], folder / "head", num_attention_heads=4)
    return folder


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(workload, "CONTEXTS", (40, 17, 1))  # interpreted kernels take their time


def load(folder: Path, **about: Any) -> HeadRunner:
    settings = dict(kernels="torch", step_rows=3, branches=4, max_tail=8, ranks=3, self_check=True)
    few = dict(max_model_len=160, max_forward_tokens=64, num_kv_blocks=NUM_BLOCKS)
    return head_runner(folder, SHAPE["vocab_size"], **{**few, **settings, **about})


def with_steps(runner: HeadRunner) -> HeadRunner:
    runner.num_blocks, runner.dummy_slot = NUM_BLOCKS - 1, DUMMY
    runner.steps = GraphRunner([make_step(runner, TREE, 3, num_sides=2)], eager=True)
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


def forget_told(whole: Any, *about: Any) -> None: ...


def leave_out_a_tile(whole: Any, self: Any, i: int, hidden: Tensor) -> Any:
    if not i:
        self._both[:, 16:24] = 0
    return whole(self, i, hidden)


def leave_no_states(whole: Any, self: Any) -> Any:
    kept = self._states.rows.clone()
    logits = whole(self)
    self._states.rows.copy_(kept)
    return logits


def misplace_tokens(whole: Any, self: Any) -> Any:
    return whole(self).roll(1, dims=1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (ToldStates, "put", forget_told, "logits of a head's step"),
        (HeadStepProducts, "project", leave_out_a_tile, "logits of a head's step"),
        (HeadStepLayers, "finish", leave_no_states, "state for the next row of a head's step"),
        (HeadStepLayers, "finish", misplace_tokens, "logits of a head's step"),
    ],
)
def test_a_step_that_is_wrong_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, words: str
) -> None:
    runner = with_steps(load(folder))
    harm(monkeypatch, owner, name, broken)
    with pytest.raises(SelfCheckError, match=f"self-check of head: {words} .*--no-self-check"):
        check_head(runner)


def test_services_load_heads_that_are_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(checking, "check_head", checked.append)
    assert checked == [load(folder, make=load_checked_head)]
    load(folder, make=load_checked_head, self_check=False)
    assert len(checked) == 1
