"""The weights of a grown head: its own, and filler around them, as in a grown model.

The new entries of its states are zero, as fc and the layers write none there. What a grown target
has in the new entries of its features is zero, too, but for the constant of a larger vocabulary: fc
reads none of them. Logits of new tokens are computed and left out, since nobody drafts them.
"""

import torch

from ssd_engine.checkpoints.expanded_weights import (
    AXES,
    WeightGrowth,
    module_of,
    places,
    scales,
)
from ssd_engine.checkpoints.heads.head_checkpoint import OFFSETS, expected_shapes
from ssd_engine.checkpoints.heads.head_config import HeadConfig

# What each dimension counts of weights that a model does not have, or has of another shape.
HEAD_AXES = {
    "fc": ("hidden", "features"),
    "lm_head": ("drafted", "hidden"),
    "hidden_norm": ("hidden",),
    "fc_norm": ("hidden",),  # a head grows only where its hidden size is its target's
    "input_norm": ("features",),
}
NORMS = ("hidden_norm", "fc_norm", "input_norm")
# In the first layer these read two hidden states side by side.
PAIRED = tuple(f"layers.0.self_attn.{each}_proj.weight" for each in ("q", "k", "v"))


def head_growth(head: HeadConfig, grown: HeadConfig) -> WeightGrowth:
    held, sizes = expected_shapes(head), expected_shapes(grown)
    wide, state = grown.layers.hidden_size, torch.arange(head.layers.hidden_size)
    norm = scales(head.layers, grown.layers)
    return WeightGrowth(
        held=held,
        grown=sizes,
        axes={name: _axes(name) for name in held if name != OFFSETS},
        places={
            **places(head.layers, grown.layers),
            "drafted": torch.arange(head.draft_vocab_size),
            "pair": torch.cat((state, wide + state)),
            "features": torch.cat([i * wide + state for i in range(head.num_features)]),
        },
        scales={**norm, **dict.fromkeys(NORMS, norm["norm"])},
    )


def _axes(name: str) -> tuple[str, ...]:
    module = module_of(name)
    own = HEAD_AXES.get(module) or AXES[module]
    return (own[0], "pair") if name in PAIRED else own
