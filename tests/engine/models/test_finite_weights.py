"""A checkpoint whose weights are no numbers is refused, by file, weight and count."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def spoil(
    directory: Path, names: list[str], value: float, *places: Any, file: str = "model.safetensors"
) -> None:
    """Put a value at these places of each of these weights."""
    weights = load_file(directory / file)
    for name, place in product(names, places):
        weights[name][place] = value
    save_file(weights, directory / file, {"format": "pt"})


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
    spoil(tmp_path, [name], value, *places)
    with pytest.raises(ModelError) as raised:
        make_runner(tmp_path)
    text = str(raised.value)
    assert f"{tmp_path / 'model.safetensors'}: weight {name}: {counted} values are NaN" in text
    assert "\n" not in text


def test_the_first_of_many_are_named(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    norms = [f"model.layers.{i}.input_layernorm.weight" for i in range(3)]
    spoil(tmp_path, [*norms, MATRIX], NAN, 0)
    with pytest.raises(ModelError, match=r"\(and 1 more\)$") as raised:
        make_runner(tmp_path)
    assert str(raised.value).count("NaN") == 3


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_rows_that_only_pad_may_be_anything(tmp_path: Path, name: str) -> None:
    make_model("llama3-untied", tmp_path)
    spoil(tmp_path, [name], NAN, slice(500, None))
    few, one_more = (
        replace(load_model_config(tmp_path), vocab_size=count, head_rows=count)
        for count in (500, 501)
    )
    about = SingleRank(), torch.float32, torch.device("cpu")
    load_weights(few, few, open_checkpoint(tmp_path, few), *about)
    with pytest.raises(ModelError, match="64 of 32064 values are NaN"):
        load_weights(one_more, one_more, open_checkpoint(tmp_path, one_more), *about)


def test_what_a_dtype_does_not_hold_is_said_to_be_that(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    spoil(tmp_path, [MATRIX], 1e6, (0, 0))
    make_runner(tmp_path)
    with pytest.raises(
        ModelError, match=r"down_proj.weight: 1 values are too large for float16; -"
    ):
        make_runner(tmp_path, dtype="float16")


class OneOfTwo(SingleRank):
    """A rank beside another one, which has this number: the place of what it has found."""

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
    spoil(tmp_path, [name], NAN, -1)  # of the second rank's part
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
    spoil(tmp_path, ["model.norm.weight"], 3e38, slice(None))
    runner = make_runner(tmp_path)
    with pytest.raises(ModelError, match="logits that are NaN or infinite"):
        warm_up(cast(Any, runner))
    (tmp_path / "whole").mkdir()
    make_model("qwen3", tmp_path / "whole")
    warm_up(cast(Any, make_runner(tmp_path / "whole")))


def test_weights_are_named_with_their_shard(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][MATRIX]
    spoil(tmp_path, [MATRIX], NAN, 0, file=shard)
    with pytest.raises(ModelError, match=f"{shard}: weight {MATRIX}: 176 of"):
        make_runner(tmp_path)
