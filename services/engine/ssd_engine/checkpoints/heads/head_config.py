"""The shape of an EAGLE-3 head (arXiv 2503.01840), read from its ``config.json``. No torch here.

Two formats are published: a flat config of the layers with what the head adds to it, and that of
the speculators package, where the layers have a config of their own. Both say which hidden states
of the target the head reads, and count them in different ways: here they are *boundaries*.
Boundary i is the residual stream before layer i; that of as many as there are layers, after the
last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ssd_engine.checkpoints.families.llama import LLAMA
from ssd_engine.checkpoints.families.qwen3 import QWEN3
from ssd_engine.checkpoints.files.model_files import (
    Fields,
    is_integer,
    is_there,
    named,
    read_object,
    shown,
)
from ssd_engine.checkpoints.model_config import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    ModelConfig,
    parse_model_config,
)
from ssd_engine.errors import ConfigError

CONFIG = "config.json"
FAMILIES = {family.model_type: family for family in (LLAMA, QWEN3)}  # layers that heads have
NUM_FEATURES = 3  # where a config does not say
DTYPE = "bfloat16"  # likewise: as most heads are published
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields by which a flat config of a head differs from that of a model.
SIGNS = ("draft_vocab_size", "eagle_config")


class FeatureNorm(Enum):
    """A norm of the target's hidden states before they are combined."""

    NONE = "none"
    EACH = "each"  # of each boundary's by themselves
    WHOLE = "whole"  # of all of them, one after the other


@dataclass(frozen=True)
class HeadConfig:
    layers: ModelConfig  # of the head's own layers; its vocabulary is the target's
    target_hidden_size: int
    boundaries: tuple[int, ...] | None  # None: by the target's layers
    num_features: int  # boundaries that it reads
    draft_vocab_size: int
    feature_norm: FeatureNorm
    norm_before_residual: bool  # what the first layer adds to is normed
    norm_output: bool  # what the next token's row is given is normed
    verifier: str  # the target's name, as the config has it; often empty

    @property
    def feature_width(self) -> int:
        """The values of one token's features."""
        return self.num_features * self.target_hidden_size


def is_head(directory: Path) -> bool:
    """Whether a directory has a head and not a model; False where there is no telling."""
    file = directory / CONFIG
    return is_there(file) and _is_head(read_object(file))


def _is_head(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw or any(sign in raw for sign in SIGNS)


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Those that heads are trained with where nothing else is said."""
    return (2, num_layers // 2, num_layers - 3)


def parse_aux_layers(text: str | None) -> tuple[int, ...] | None:
    """The boundaries that an operator names; None: those of the head's config."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise ConfigError(f"--aux-layers: a list such as 2,16,29 is needed, got {text!r}")
    return tuple(map(int, parts))


def load_head_config(directory: Path, aux_layers: Sequence[int] | None = None) -> HeadConfig:
    """``aux_layers``: boundaries that an operator knows better."""
    file = directory / CONFIG
    head = parse_head_config(read_object(file), file)
    if aux_layers is None:
        return head
    if len(aux_layers) != head.num_features:
        raise ConfigError(
            f"--aux-layers: this head reads {head.num_features} hidden states of its target, got "
            f"{len(aux_layers)}"
        )
    return replace(head, boundaries=tuple(aux_layers))


def parse_head_config(raw: Mapping[str, Any], source: object = CONFIG) -> HeadConfig:
    """Accept what is computed exactly; refuse every variant that would be got wrong."""
    fields = Fields(source, raw)
    if "speculators_model_type" in raw:
        return _parse_speculators(fields)
    if not _is_head(raw):
        raise fields.problem("draft_vocab_size", "an EAGLE-3 head is needed, this is a model")
    return _parse_flat(fields)


def fit_to_target(head: HeadConfig, target: ModelConfig, name: str) -> HeadConfig:
    """The head with the boundaries of this target; raises ConfigError where they do not fit."""
    pairs = (
        ("hidden size", head.target_hidden_size, target.hidden_size),
        ("vocabulary", head.layers.embedding_rows, target.embedding_rows),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"this head was made for a target with a {what} of {ours}, {name} has {theirs}: "
                "name the target that it was trained for"
            )
    if head.boundaries is None and head.num_features != NUM_FEATURES:
        raise ConfigError(
            f"num_aux_hidden_states: this head reads {head.num_features} hidden states of its "
            "target, and its config does not say which: name them by --aux-layers"
        )
    boundaries = head.boundaries or default_boundaries(target.num_layers)
    wrong = [each for each in boundaries if not 0 <= each <= target.num_layers]
    if wrong:
        raise ConfigError(
            f"this head reads hidden states at boundary {wrong[0]}, {name} has 0 to "
            f"{target.num_layers}: name the target that it was trained for, or use --aux-layers"
        )
    return replace(head, boundaries=tuple(boundaries), num_features=len(boundaries))


def _parse_speculators(fields: Fields) -> HeadConfig:
    kind = fields.get("speculators_model_type")
    if kind != "eagle3":
        got = named(kind) if isinstance(kind, str) else shown(kind)
        raise fields.problem("speculators_model_type", f"{got} is not supported, only eagle3")
    layers = fields.nested("transformer_layer_config")
    method = fields.nested("speculators_config").nested("verifier")
    ids = _layer_ids(fields, plus=0)
    return _head(fields, layers, ids, method.text("name_or_path", ""))


def _parse_flat(fields: Fields) -> HeadConfig:
    eagle = fields.nested("eagle_config")
    if eagle.get("use_aux_hidden_state") is False:
        raise eagle.problem(
            "use_aux_hidden_state",
            "heads that read the last hidden state alone are EAGLE-1 and 2, which are not "
            "supported",
        )
    # Those who train heads in this format count outputs of layers there.
    ids = _layer_ids(eagle, plus=1) or _layer_ids(fields, plus=0)
    return _head(fields, fields, ids, "")


def _layer_ids(fields: Fields, plus: int) -> tuple[int, ...] | None:
    """As boundaries; None where the file does not say."""
    ids = fields.items(LAYER_IDS)
    if not all(is_integer(each) and 0 <= each + plus <= MAX_LAYERS for each in ids):
        raise fields.wrong(LAYER_IDS, "a list of numbers of the target's layers")
    return tuple(each + plus for each in ids) or None


def _head(
    fields: Fields, layers: Fields, boundaries: tuple[int, ...] | None, verifier: str
) -> HeadConfig:
    model = _parse_layers(layers, _dtype(layers) or _dtype(fields) or DTYPE)
    counted = fields.integer("num_aux_hidden_states", 1, MAX_LAYERS, NUM_FEATURES)
    if fields.flag("norm_before_fc") and fields.flag("fc_norm"):
        raise fields.problem("fc_norm", "one of fc_norm and norm_before_fc is possible, not both")
    each = fields.flag("fc_norm") or fields.flag("use_aux_norm")
    norm = FeatureNorm.EACH if each else FeatureNorm.NONE
    return HeadConfig(
        layers=model,
        target_hidden_size=fields.integer("target_hidden_size", 1, MAX_WIDTH, model.hidden_size),
        boundaries=boundaries,
        num_features=counted if boundaries is None else len(boundaries),
        draft_vocab_size=_draft_vocabulary(fields, model.vocab_size),
        feature_norm=FeatureNorm.WHOLE if fields.flag("norm_before_fc") else norm,
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_output=fields.flag("norm_output"),
        verifier=verifier,
    )


def _dtype(fields: Fields) -> str:
    return fields.text("dtype", fields.text("torch_dtype", ""))


def _parse_layers(fields: Fields, dtype: str) -> ModelConfig:
    kind = fields.text("model_type", LLAMA.model_type)
    family = FAMILIES.get(kind)
    if family is None:
        known = " and ".join(FAMILIES)
        raise fields.problem("model_type", f"{named(kind)} is not supported, only {known}")
    # A head is never tied to its embedding, whatever was copied from the target's config; and what
    # ends a text is the target's business.
    own = {
        "architectures": [family.architecture],
        "model_type": kind,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "dtype": dtype,
    }
    return parse_model_config({**fields.values, **own}, fields.source)


def _draft_vocabulary(fields: Fields, vocab_size: int) -> int:
    size = fields.integer("draft_vocab_size", 1, MAX_VOCABULARY, vocab_size)
    if size > vocab_size:
        raise fields.wrong("draft_vocab_size", f"at most the target's {vocab_size} tokens")
    return size
