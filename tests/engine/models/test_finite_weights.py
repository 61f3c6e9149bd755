"""A checkpoint whose weights are no numbers is refused, by file, weight and count."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.errors import ModelError
from ssd_engine.models import finite_weights
from ssd_engine.models.finite_weights import FiniteWeights
from ssd_engine.models.loader import load_weights
from ssd_engine.models.tensor_parallel import SingleRank
from ssd_serving.engine.loop import warm_up
from tests.harness import make_runner
from tests.random_models import make_model

NAN, INF = float("nan"), float("inf")
MATRIX = "model.layers.1.mlp.down_proj.weight"


def change(directory: Path, changes: dict[str, Callable[[Tensor], Tensor]]) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    for name, how in changes.items():
        weights[name] = how(weights[name])
    save_file(weights, file, {"format": "pt"})


def spoilt(value: float, *places: Any) -> Callable[[Tensor], Tensor]:
    def spoil(weight: Tensor) -> Tensor:
        weight = weight.clone()
        for place in places:
            weight[place] = value
        return weight

    return spoil


@pytest.mark.parametrize(
    ("name", "value", "places", "counted"),
    [
        (MATRIX, NAN, [(0, 0), (3, 5)], "2 of 11264"),
        (MATRIX, INF, [(-1, -1)], "1 of 11264"),
        ("model.layers.0.self_attn.k_proj.bias", -INF, [slice(None)], "16 of 16"),
        ("model.norm.weight", NAN, [7], "1 of 64"),
        ("model.embed_tokens.weight", NAN, [9], "64 of 32768"),
        ("lm_head.weight", INF, [(511, 63)], "1 of 32768"),
    ],
)
def test_what_is_no_number_is_named_and_counted(
    tmp_path: Path, name: str, value: float, places: list[Any], counted: str
) -> None:
    make_model("llama-biases", tmp_path)
    change(tmp_path, {name: spoilt(value, *places)})
    with pytest.raises(ModelError) as raised:
        make_runner(tmp_path)
    text = str(raised.value)
    assert f"{tmp_path / 'model.safetensors'}: weight {name}: {counted} values are NaN" in text
    assert "\n" not in text


def test_the_first_of_many_are_named(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    norms = [f"model.layers.{i}.{kind}_layernorm.weight" for i in range(3) for kind in ("input",)]
    change(tmp_path, dict.fromkeys([*norms, MATRIX], spoilt(NAN, 0)))
    with pytest.raises(ModelError, match=r"\(and 1 more\)$") as raised:
        make_runner(tmp_path)
    assert str(raised.value).count("NaN") == 3


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_rows_that_only_pad_may_be_anything(tmp_path: Path, name: str) -> None:
    make_model("llama3-untied", tmp_path)
    change(tmp_path, {name: spoilt(NAN, slice(500, None))})
    config = load_model_config(tmp_path)

    def load(num_tokens: int) -> None:
        fewer = replace(config, vocab_size=num_tokens, head_rows=num_tokens)
        checkpoint, cpu = open_checkpoint(tmp_path, fewer), torch.device("cpu")
        load_weights(fewer, fewer, checkpoint, SingleRank(), torch.float32, cpu)

    load(500)
    with pytest.raises(ModelError, match="64 of 32064 values are NaN"):
        load(501)


def test_what_a_dtype_does_not_hold_is_said_to_be_that(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    change(tmp_path, {MATRIX: spoilt(1e6, (0, 0))})
    make_runner(tmp_path)
    with pytest.raises(
        ModelError, match=r"down_proj.weight: 1 values are too large for float16; -"
    ):
        make_runner(tmp_path, dtype="float16")


class OneOfTwo(SingleRank):
    """A rank beside another one, which finds the weight of this number to be none."""

    size = 2

    def __init__(self, rank: int, found: int) -> None:
        self.rank, self.found = rank, found

    def minimum(self, value: int) -> int:
        return min(value, self.found)


def test_the_first_rank_reads_and_names_the_weight_that_another_one_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the others, which wait: whoever died first would be blamed in its place."""
    make_model("qwen3", tmp_path)
    order = sorted(load_file(tmp_path / "model.safetensors"))
    name = "model.layers.2.self_attn.q_proj.weight"
    where = order.index(name)
    with pytest.raises(ModelError, match=f"^weight {name}: not finite on another rank;"):
        make_runner(tmp_path, tp=OneOfTwo(0, where))  # it is another node's file
    change(tmp_path, {name: spoilt(NAN, -1)})  # of the second rank's part
    read, whole = list[str](), FiniteWeights._problem

    def problem(self: FiniteWeights, name: str) -> str:
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(FiniteWeights, "_problem", problem)
    with pytest.raises(ModelError, match=f"weight {name}: 64 of"):
        make_runner(tmp_path, tp=OneOfTwo(0, where))
    waits: list[float] = []
    monkeypatch.setattr(finite_weights.time, "sleep", waits.append)
    with pytest.raises(RuntimeError, match=f"weight {name}: not finite, and rank 0 has not ended"):
        make_runner(tmp_path, tp=OneOfTwo(1, len(order)))
    assert (read, waits) == ([name], [finite_weights.END_SECONDS])


def test_logits_that_are_no_numbers_end_the_warm_up(tmp_path: Path) -> None:
    """Each weight is a number, but what comes of them is none."""
    make_model("qwen3", tmp_path)
    change(tmp_path, {"model.norm.weight": lambda weight: weight * 0 + 3e38})
    runner = make_runner(tmp_path)
    with pytest.raises(ModelError, match="logits that are NaN or infinite"):
        warm_up(cast(Any, runner))
    (tmp_path / "whole").mkdir()
    make_model("qwen3", tmp_path / "whole")
    warm_up(cast(Any, make_runner(tmp_path / "whole")))


def test_weights_are_named_with_their_shard(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {}
    for name, weight in weights.items():
        places[name] = f"model-{1 + (name == MATRIX)}.safetensors"
        weights[name] = spoilt(NAN, 0)(weight) if name == MATRIX else weight
    for file in set(places.values()):
        held = {name: weight for name, weight in weights.items() if places[name] == file}
        save_file(held, tmp_path / file, {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=rf"model-2.safetensors: weight {MATRIX}: 176 of"):
        make_runner(tmp_path)
