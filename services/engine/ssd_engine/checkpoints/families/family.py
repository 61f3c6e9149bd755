"""What makes a family of dense decoders. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ssd_engine.checkpoints.files.model_files import Fields


class QKNorm(Enum):
    """A norm of queries and keys before they are rotated."""

    NONE = "none"
    HEAD = "head"  # of each head by itself
    PROJECTION = "projection"  # of all heads together


@dataclass(frozen=True)
class LayerTraits:
    """What the layers of a model have, beside the products that all have."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    norms_outputs: bool = False  # norms are after attention and MLP, not before


@dataclass(frozen=True)
class Family:
    architecture: str  # its names in config.json: architectures
    model_type: str
    read_traits: Callable[[Fields], LayerTraits]  # refuses what would be computed wrongly
