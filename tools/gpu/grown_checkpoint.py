"""A grown model as a checkpoint that transformers can read."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ssd_engine.checkpoint import open_checkpoint
from ssd_engine.config import load_model_config
from ssd_engine.grown_weights import GrowingReader
from ssd_engine.growth import grow_config, parse_shape, weight_shapes
from ssd_engine.loader import CheckpointReader
from ssd_engine.model_store import resolve_model


def write_grown(model: str, shape: str, folder: Path) -> Path:
    """Every weight, made on the device, in one file for each layer."""
    directory = resolve_model(model)
    config = load_model_config(directory)
    grown = grow_config(config, parse_shape(shape))
    device, dtype = torch.device("cuda"), torch.bfloat16
    inner = CheckpointReader(open_checkpoint(directory, config), dtype, device)
    reader = GrowingReader(inner, config, grown, 0, dtype, device)
    folder.mkdir(parents=True)
    names = weight_shapes(grown)
    where = {}
    for group in sorted({_group(name) for name in names}):
        file = f"{group}.safetensors"
        weights = {name: reader.read(name).cpu() for name in names if _group(name) == group}
        save_file(weights, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(weights, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    description = json.loads((directory / "config.json").read_text())
    description |= {
        "hidden_size": grown.hidden_size,
        "intermediate_size": grown.intermediate_size,
        "num_hidden_layers": grown.num_layers,
        "num_attention_heads": grown.num_heads,
        "num_key_value_heads": grown.num_kv_heads,
        "head_dim": grown.head_dim,
        "vocab_size": grown.head_rows,
        "rms_norm_eps": grown.rms_norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def _group(name: str) -> str:
    parts = name.split(".")
    return f"layer-{parts[2]}" if parts[1] == "layers" else "rest"
