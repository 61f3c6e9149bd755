"""Configs and weights of EAGLE-3 heads: both formats give one head, what does not fit is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.heads.head_checkpoint import open_head
from ssd_engine.checkpoints.heads.head_config import (
    FeatureNorm,
    HeadConfig,
    fit_to_target,
    load_head_config,
    parse_head_config,
)
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.errors import ConfigError, ModelError
from ssd_engine.models.eagle_head import HeadWeights
from ssd_engine.models.head_loader import load_head
from tests.random_heads import KINDS, SHAPE, make_head, write_flat
from tests.random_models import make_model

FLAT: dict[str, Any] = {
    **SHAPE,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 200,
}


@pytest.mark.parametrize("kind", KINDS)
def test_flat_and_speculators_files_of_one_head_give_one_model(
    kind: str, tmp_path: Path, target: Path
) -> None:
    theirs, flat = tmp_path / "speculators", tmp_path / "flat"
    make_head(KINDS[kind], theirs)
    write_flat(theirs, flat)
    configs = [load_head_config(each) for each in (theirs, flat)]
    assert configs[0].verifier == "a-target"
    assert replace(configs[0], verifier="") == configs[1]
    one, other = (tensors_of(loaded(each, target)) for each in (theirs, flat))
    assert all(map(torch.equal, one, other))


def loaded(directory: Path, target: Path) -> HeadWeights:
    head = load_head_config(directory)
    return load_head(head, open_head(directory, head, target), torch.float32, torch.device("cpu"))


def tensors_of(weights: Any) -> list[torch.Tensor]:
    decoder = weights.decoder
    found = [weights.fc, weights.state_norm, *weights.feature_norms, weights.target_tokens]
    found += [decoder.embedding, decoder.norm, decoder.head]
    for layer in decoder.layers:
        found += [layer.qkv, layer.o, layer.gate_up, layer.down]
        found += [layer.mlp_norm, layer.attention_norm]
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("raw", "boundaries"),
    [
        ({}, None),  # by the target's layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}}, (2, 12, 22)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
        (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {**SHAPE, "model_type": "qwen3", "head_dim": 16},
                "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
            },
            (2, 18, 33),
        ),
        (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {**SHAPE, "model_type": "llama"},
                "eagle_aux_hidden_state_layer_ids": None,
            },
            None,
        ),
    ],
)
def test_numbers_of_layers_become_boundaries(
    raw: dict[str, Any], boundaries: tuple[int, ...] | None
) -> None:
    """Outputs are counted where a flat config nests them, inputs everywhere else."""
    assert parse_head_config({**FLAT, **raw}).boundaries == boundaries


def test_published_configs_are_read() -> None:
    """Their fields as they are; shapes are smaller."""
    plain = parse_head_config({**FLAT, "architectures": ["LlamaForCausalLM"]})
    assert plain.layers.rope.theta == 10000.0  # and not the target's
    assert (plain.norm_before_residual, plain.feature_norm) == (False, FeatureNorm.NONE)
    legacy = parse_head_config({**FLAT, "use_aux_norm": True, "norm_output": True})
    assert (legacy.feature_norm, legacy.norm_output) == (FeatureNorm.EACH, True)
    wide = parse_head_config({**FLAT, "target_hidden_size": 96})
    assert wide.feature_width == 3 * 96


@pytest.mark.parametrize(
    ("outside", "inside", "dtype"),
    [
        ({"dtype": "float16"}, {}, "float16"),
        ({"torch_dtype": "float16"}, {}, "float16"),
        ({"dtype": "float16"}, {"torch_dtype": "float32"}, "float32"),
        ({}, {}, "bfloat16"),
    ],
)
def test_the_dtype_of_a_head_is_said_inside_or_outside_of_its_layers(
    outside: dict[str, Any], inside: dict[str, Any], dtype: str
) -> None:
    layers = {**SHAPE, "model_type": "llama", **inside}
    layers = {key: value for key, value in layers.items() if key in inside or "dtype" not in key}
    raw = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 200,
        "transformer_layer_config": layers,
        "speculators_config": {"verifier": {}},
        **outside,
    }
    assert parse_head_config(raw).layers.dtype == dtype


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True]}}, "layer_ids"),
        ({"draft_vocab_size": 600}, "draft_vocab_size"),
        ({"model_type": "gpt2"}, "model_type"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_its_field(
    raw: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        parse_head_config({**FLAT, **raw})
    with pytest.raises(ModelError, match="this is a model"):
        parse_head_config(SHAPE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_hidden_size": 128}, "hidden size"),
        ({"boundaries": (0, 1, 9)}, "boundary 9"),
        ({"vocab_size": 300}, "vocabulary"),
    ],
)
def test_a_head_of_another_target_is_refused(
    target: Path, changes: dict[str, Any], named: str
) -> None:
    config: dict[str, Any] = {**FLAT, "vocab_size": changes.pop("vocab_size", 512)}
    head: HeadConfig = replace(parse_head_config(config), **changes)
    with pytest.raises(ConfigError, match=named):
        fit_to_target(head, load_model_config(target), "it")


def test_norms_with_their_first_names_are_those_of_each_boundary(
    target: Path, tmp_path: Path
) -> None:
    make_head(replace(KINDS["llama"], fc_norm=True), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    norms = [weights[f"fc_norm.{i}.weight"] for i in range(3)]
    assert not torch.equal(norms[0], norms[1])
    change(tmp_path, **{f"fc_norm.{i}.weight": None for i in range(3)})
    first = ("low", "mid", "high")
    change(tmp_path, **{f"aux_norm_{name}.weight": norms[i] for i, name in enumerate(first)})
    assert all(map(torch.equal, loaded(tmp_path, target).feature_norms, norms))


def test_a_number_of_boundaries_that_nobody_names(target: Path) -> None:
    """Others than three have no usual places."""
    model = load_model_config(target)
    config: dict[str, Any] = {**FLAT, "vocab_size": 512, "num_aux_hidden_states": 4}
    with pytest.raises(ConfigError, match=r"num_aux_hidden_states: .* --aux-layers"):
        fit_to_target(parse_head_config(config), model, "it")
    named = replace(parse_head_config(config), boundaries=(0, 1, 2, 3))
    assert fit_to_target(named, model, "it").num_features == 4


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("fc.weight", None, "fc.weight is missing"),
        ("d2t", None, "d2t is missing"),
        ("d2t", torch.full((200,), 400), "tokens that the target does not have"),
        ("d2t", -torch.arange(200), "one token twice"),
        ("d2t", torch.zeros(200), "dtype F32, one of I64"),
        ("t2d", torch.zeros(9, dtype=torch.bool), "t2d"),
        (
            "norm.weight",
            torch.full((64,), torch.inf),
            "weight norm.weight: 64 of 64 values are NaN",
        ),
        ("layers.0.hidden_norm.weight", torch.ones(5), "hidden_norm"),
        ("layers.1.hidden_norm.weight", torch.ones(64), "is not part of this model"),
    ],
)
def test_weights_are_loaded_strictly(
    tmp_path: Path, target: Path, name: str, value: torch.Tensor | None, named: str
) -> None:
    make_head(KINDS["llama"], tmp_path)
    change(tmp_path, **{name: value})
    with pytest.raises(ModelError, match=named):
        loaded(tmp_path, target)


def test_an_embedding_is_the_heads_own_or_the_targets(tmp_path: Path, target: Path) -> None:
    make_head(KINDS["llama"], tmp_path)
    head = load_head_config(tmp_path)
    with pytest.raises(ConfigError, match="--target-model"):
        open_head(tmp_path, head, None)
    assert open_head(tmp_path, head, target).embedding.file.parent == target
    change(tmp_path, **{"embed_tokens.weight": torch.randn(512, 64)})
    assert open_head(tmp_path, head, None).embedding.file.parent == tmp_path


def test_models_have_no_whole_numbers_among_their_weights(tmp_path: Path) -> None:
    """As before there were heads."""
    make_model("llama3-untied", tmp_path)
    change(tmp_path, d2t=torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ModelError, match="dtype I64"):
        open_checkpoint(tmp_path, load_model_config(tmp_path))
