"""A grown model as a checkpoint that transformers can read."""

import json
from pathlib import Path

import torch

from ssd_engine.checkpoints.checkpoint import open_checkpoint
from ssd_engine.checkpoints.expanded_weights import ExpandingReader
from ssd_engine.checkpoints.model_config import load_model_config
from ssd_engine.checkpoints.model_expansion import grow_config, parse_shape
from ssd_engine.checkpoints.model_store import resolve_model
from ssd_engine.checkpoints.weight_shapes import expected_shapes
from ssd_engine.models.loader import CheckpointReader
from tools.gpu.checkpoint_files import write_weights


def write_grown(model: str, shape: str, folder: Path) -> Path:
    """Every weight is made on the device."""
    directory = resolve_model(model)
    config = load_model_config(directory)
    grown = grow_config(config, parse_shape(shape))
    device, dtype = torch.device("cuda"), torch.bfloat16
    inner = CheckpointReader(open_checkpoint(directory, config), dtype, device)
    reader = ExpandingReader(inner, config, grown, 0, dtype, device)
    folder.mkdir(parents=True)
    write_weights(folder, expected_shapes(grown), reader.read)
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
