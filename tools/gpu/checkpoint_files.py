"""The files of a checkpoint: weights are made and written layer by layer, so that one fits."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ssd_engine.checkpoints.checkpoint import INDEX


def write_weights(folder: Path, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
    """In bf16: one file for each layer, one for all else, and their index."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group(name), []).append(name)
    where: dict[str, str] = {}
    for group, members in groups.items():
        file = f"{group}.safetensors"
        weights = {name: make(name).to(torch.bfloat16).cpu() for name in members}
        save_file(weights, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(weights, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _group(name: str) -> str:
    parts = name.split(".")
    return f"layer-{parts[2]}" if parts[1] == "layers" else "rest"
