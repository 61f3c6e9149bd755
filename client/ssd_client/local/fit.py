"""Whether a draft fits beside its target on one GPU, and how deep it can speculate there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_client.local.mps import DRAFT_SHARE

# As measured on an H200 (docs/gpu.md, "One GPU for both").
BYTES_PER_SECOND = 3.8e12  # a forward reads so many
SHORTEST_STEP = 0.8e-3  # seconds of a draft's step, however small the model: its launches
SLOWER = 80 / 30  # times as long as on the whole GPU a draft's step takes on DRAFT_SHARE of it

DEPTHS = (7, 6, 5, 4, 3)  # a shorter tree is worth no part of a GPU
MOST_READ = 0.25  # share of the target's own bytes that a draft may read during a forward
_BYTES = 2  # bytes of a weight, in bf16


class Fit(NamedTuple):
    share: int  # percent of the multiprocessors, for the draft; the target has the rest
    depth: int  # tokens of a speculation


def choose_fit(target_bytes: int, draft_bytes: int, depths: Sequence[int] = DEPTHS) -> Fit | None:
    """The deepest tree that is ready in time; None where there is no room.

    The rule: while the target reads its weights once, the draft makes depth + 1 steps, and reads
    its own in each. A step takes its bytes at the GPU's bandwidth, but at least SHORTEST_STEP, and
    SLOWER times as long on its part. Both share the bandwidth, so that the forward takes as long as
    all bytes that the two read. The steps must be done by then, and the draft must not read more
    than MOST_READ of what the target reads: that is what it costs.

    The part is always the same: on a smaller one even the smallest draft was late, as its blocks
    wait for the target's, and a larger one slows the target down.
    """
    for depth in depths:
        read = (depth + 1) * draft_bytes
        forward = (target_bytes + read) / BYTES_PER_SECOND
        step = SLOWER * max(draft_bytes / BYTES_PER_SECOND, SHORTEST_STEP)
        if read <= MOST_READ * target_bytes and (depth + 1) * step <= forward:
            return Fit(DRAFT_SHARE, depth)
    return None


def forward_bytes(model: str) -> int | None:
    """Weights that a forward of the model reads, its layers and its head; None if not known.

    A folder is looked into, and what the hub's cache has; nothing is downloaded.
    """
    folder = folder_of(model)
    try:
        return None if folder is None else _count(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None  # the service will say what is wrong with it


def folder_of(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.count("/") != 1:
        return None
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    cached = cache / f"models--{model.replace('/', '--')}"
    try:
        return cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
    except OSError:
        return None


def _count(config: Mapping[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys_and_values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    attention = hidden * (queries + keys_and_values) + queries * hidden
    layer = attention + 3 * hidden * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return _BYTES * int(weights)
