"""The weights of a head: one set of names for both formats, loaded as strictly as a model's.

fc.weight                       combines a token's features
layers.I.…                      as a model's layers; the first one reads twice as much, and has
                                hidden_norm for the features, input_layernorm for the embedding
norm.weight, lm_head.weight     as a model's, over the tokens that the head can draft
d2t                             what to add to a drafted number to get the target's token
embed_tokens.weight             often left out: the target's own
"""

from dataclasses import dataclass
from pathlib import Path

from ssd_engine.checkpoints.checkpoint import (
    Checkpoint,
    WeightEntry,
    check_weights,
    read_headers,
)
from ssd_engine.checkpoints.heads.head_config import FeatureNorm, HeadConfig
from ssd_engine.checkpoints.weight_shapes import layer_shapes
from ssd_engine.errors import ConfigError, ModelError

EMBEDDING = "embed_tokens.weight"
TARGET_EMBEDDING = "model.embed_tokens.weight"
OFFSETS = "d2t"  # [draft tokens]
KNOWN = "t2d"  # [target tokens], which of them can be drafted: d2t says the same
FIRST_LAYER = ("midlayer.", "layers.0.")
LEGACY_NORMS = ("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")
MAPPINGS = {OFFSETS: "I64", KNOWN: "BOOL"}  # all that is no number of a product


@dataclass(frozen=True)
class HeadCheckpoint:
    config: HeadConfig  # the head's own shape
    weights: Checkpoint  # by the names above
    embedding: WeightEntry  # the head's own, or its target's


def open_head(directory: Path, head: HeadConfig, target: Path | None) -> HeadCheckpoint:
    """Read the headers and hold them against the config. ``target``: its model's directory."""
    entries = {_name(name): entry for name, entry in read_headers(directory, MAPPINGS).items()}
    known = entries.pop(KNOWN, None)
    expected = expected_shapes(head)
    if known is not None and known.shape != (head.layers.embedding_rows,):
        raise ModelError(f"{known.file}: {KNOWN} has shape {list(known.shape)}, not the target's")
    if head.draft_vocab_size == head.layers.vocab_size and OFFSETS not in entries:
        del expected[OFFSETS]  # every token is its own
    embedding = entries.get(EMBEDDING)
    if embedding is None:
        del expected[EMBEDDING]
        embedding = _embedding_of(target, head, directory)
    check_weights(directory, entries, expected)
    return HeadCheckpoint(head, Checkpoint(entries), embedding)


def expected_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a head of this config can hold."""
    layers = head.layers
    d = layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, head.feature_width),
        "norm.weight": (d,),
        "lm_head.weight": (head.draft_vocab_size, d),
        OFFSETS: (head.draft_vocab_size,),
        EMBEDDING: (layers.embedding_rows, d),
    }
    for i in range(layers.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(layers).items()}
    for projection in ("q", "k", "v"):
        name = f"layers.0.self_attn.{projection}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * d)
    shapes["layers.0.hidden_norm.weight"] = (d,)
    if head.feature_norm is FeatureNorm.WHOLE:
        shapes["input_norm.weight"] = (head.feature_width,)
    if head.feature_norm is FeatureNorm.EACH:
        for i in range(head.num_features):
            shapes[f"fc_norm.{i}.weight"] = (head.target_hidden_size,)
    return shapes


def _name(name: str) -> str:
    flat, ours = FIRST_LAYER
    if name.startswith(flat):
        return ours + name.removeprefix(flat)
    for i, legacy in enumerate(LEGACY_NORMS):
        if name.startswith(legacy):
            return f"fc_norm.{i}." + name.removeprefix(legacy)
    return name


def _embedding_of(target: Path | None, head: HeadConfig, directory: Path) -> WeightEntry:
    if target is None:
        raise ConfigError(
            f"{directory} has no {EMBEDDING}, as most heads have none: name its target's directory "
            "by --target-model"
        )
    entry = read_headers(target).get(TARGET_EMBEDDING)
    if entry is None:
        raise ModelError(f"{target}: weight {TARGET_EMBEDDING} is missing")
    layers = head.layers
    needed = (layers.embedding_rows, layers.hidden_size)
    if entry.shape != needed:
        raise ConfigError(
            f"{directory} has no {EMBEDDING}, and that of {target} has shape {list(entry.shape)}: "
            f"{list(needed)} is needed"
        )
    return entry
