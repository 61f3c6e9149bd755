"""Growth of a head together with its target, with its function unchanged. No torch here.

The grown target tells the same hidden states with zeros behind them, at the same boundaries: new
layers come after the old ones and add nothing. ``expanded_head.py`` makes the weights.
"""

import math
from dataclasses import replace

from ssd_engine.checkpoints.checkpoint import Checkpoint
from ssd_engine.checkpoints.heads.head_checkpoint import expected_shapes
from ssd_engine.checkpoints.heads.head_config import HeadConfig
from ssd_engine.checkpoints.model_expansion import ModelShape, grow_config
from ssd_engine.errors import ConfigError


def shape_of_head(target: ModelShape | None) -> ModelShape | None:
    """What a head grows to whose target grows to this shape: it keeps its own layers."""
    return None if target is None else replace(target, layers=None)


def grow_head(head: HeadConfig, target: ModelShape | None) -> HeadConfig:
    """The head of a target that grows so; ``head`` was fitted to the target as it was before.

    Its layers get the sizes of the target's, and stay as many as they are. A head that drafts every
    token computes the logits of new tokens, too.
    """
    shape = shape_of_head(target)
    if shape is None:
        return head
    if head.target_hidden_size != head.layers.hidden_size:
        raise ConfigError(
            f"--expand-to: this head has a hidden size of {head.layers.hidden_size}, its target of "
            f"{head.target_hidden_size}: only a head of its target's size can grow, leave it out"
        )
    layers = grow_config(head.layers, shape)
    drafts_all = head.draft_vocab_size == head.layers.embedding_rows
    return replace(
        head,
        layers=layers,
        target_hidden_size=layers.hidden_size,
        draft_vocab_size=layers.embedding_rows if drafts_all else head.draft_vocab_size,
    )


def count_head_parameters(head: HeadConfig, weights: Checkpoint) -> int:
    """Those of a checkpoint's weights once they are as large as ``head``: an embedding that is the
    target's does not count."""
    shapes = expected_shapes(head)
    return sum(math.prod(shapes[name]) for name in weights.entries)
